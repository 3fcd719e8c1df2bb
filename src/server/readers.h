// A few threads that read bodies: JSON, and text to tokens. A long one holds up one of them, and no other client.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace basin::server {

class Readers {
 public:
  explicit Readers(int threads);
  ~Readers() { stop(); }

  /// `task` runs soon, on one of the threads, and must not throw. After stop() it is dropped.
  void post(std::function<void()> task);
  /// Ends the threads; what has not begun is dropped.
  void stop();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::vector<std::jthread> threads_;
};

}  // namespace basin::server
