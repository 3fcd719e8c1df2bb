#include "probe/npz.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <limits>

#include "basin/base/error.h"

namespace basin::probe {
namespace {

constexpr std::uint32_t kLocalMagic = 0x04034b50, kCentralMagic = 0x02014b50, kEndMagic = 0x06054b50,
                        kEnd64Magic = 0x06064b50, kLocator64Magic = 0x07064b50;
constexpr std::uint64_t kEndBytes = 22, kCentralBytes = 46, kLocalBytes = 30, kEnd64Bytes = 56,
                        kLocatorBytes = 20;
constexpr std::uint32_t kIn64 = 0xffffffffu;  // "see the zip64 field"
constexpr std::size_t kMaxHeader = std::size_t{1} << 20;

[[noreturn]] void corrupt(const std::string& what) {
  throw Error(ErrorCode::corrupt, what);
}

template <typename T>
T at(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

struct Type {
  DType dtype;
  const char* descr;
};
constexpr Type kTypes[] = {{DType::f64, "<f8"}, {DType::f32, "<f4"}, {DType::f16, "<f2"}, {DType::i64, "<i8"},
                           {DType::i32, "<i4"}, {DType::i16, "<i2"}, {DType::i8, "|i1"},  {DType::u8, "|u1"}};

// What follows `'key':` in the header's dictionary, up to the end of its value.
std::string_view field(std::string_view header, std::string_view key) {
  const std::string quoted = fmt::format("'{}'", key);
  std::size_t begin = header.find(quoted);
  if (begin == std::string_view::npos) corrupt(fmt::format("the array's header has no {}", quoted));
  begin = header.find_first_not_of(" :", begin + quoted.size());
  if (begin == std::string_view::npos) corrupt(fmt::format("the array's header has no value of {}", quoted));
  const char first = header[begin];
  const char* const stop = first == '(' ? ")" : first == '\'' ? "'" : ",}";
  const std::size_t end = header.find_first_of(stop, begin + 1);
  if (end == std::string_view::npos) corrupt(fmt::format("the array's header ends inside {}", quoted));
  return header.substr(begin, end - begin);
}

std::vector<std::int64_t> parse_shape(std::string_view text) {
  std::vector<std::int64_t> shape;
  if (text.empty() || text[0] != '(') corrupt("the array's shape is not a tuple");
  text.remove_prefix(1);
  while (true) {
    const std::size_t begin = text.find_first_not_of(" ,");
    if (begin == std::string_view::npos) return shape;
    text.remove_prefix(begin);
    std::int64_t extent = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), extent);
    if (error != std::errc() || extent < 0 || shape.size() == 8) corrupt("the array's shape is not readable");
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    shape.push_back(extent);
  }
}

std::vector<std::byte> inflate_all(const std::byte* data, std::uint64_t packed, std::uint64_t bytes) {
  // Deflate packs 1032 to 1 at most; more is a lie that would take memory.
  if (bytes / 1040 > packed + 64) corrupt("an entry claims more than its bytes can hold");
  std::vector<std::byte> out(bytes);
  z_stream stream{};
  if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) throw Error(ErrorCode::internal, "zlib refused to start");
  std::uint64_t read = 0, written = 0;
  int status = Z_OK;
  while (status == Z_OK) {
    constexpr std::uint64_t kStep = 1u << 30;
    const auto in = static_cast<uInt>(std::min(packed - read, kStep));
    const auto room = static_cast<uInt>(std::min(bytes - written, kStep));
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(data + read));
    stream.avail_in = in;
    stream.next_out = reinterpret_cast<Bytef*>(out.data() + written);
    stream.avail_out = room;
    status = inflate(&stream, Z_NO_FLUSH);
    read += in - stream.avail_in;
    written += room - stream.avail_out;
    if (status == Z_OK && in == stream.avail_in && room == stream.avail_out) status = Z_BUF_ERROR;
  }
  inflateEnd(&stream);
  if (status != Z_STREAM_END || written != bytes) corrupt("an entry does not inflate to its length");
  return out;
}

std::uint32_t checksum(const void* data, std::uint64_t bytes, std::uint32_t start = 0) {
  if (bytes == 0) return start;  // zlib would start anew where the pointer is null
  return static_cast<std::uint32_t>(crc32_z(start, static_cast<const Bytef*>(data), bytes));
}

}  // namespace

std::int64_t Array::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

void release_pages(const std::byte* begin, std::uint64_t bytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<std::uintptr_t>(begin) / page * page;
  const auto last = reinterpret_cast<std::uintptr_t>(begin) + bytes;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

Array parse_npy(std::span<const std::byte> bytes, std::shared_ptr<const void> owner) {
  if (bytes.size() < 10 || std::memcmp(bytes.data(), "\x93NUMPY", 6) != 0) corrupt("it is not a NumPy array");
  const auto version = std::to_integer<unsigned>(bytes[6]);
  if (version < 1 || version > 3) {
    throw Error(ErrorCode::unsupported, fmt::format("NumPy format {}.x; known are 1 to 3", version));
  }
  const std::size_t prefix = version == 1 ? 10 : 12;
  if (bytes.size() < prefix) corrupt("the array's header is cut off");
  const std::size_t length =
      version == 1 ? at<std::uint16_t>(bytes.data() + 8) : at<std::uint32_t>(bytes.data() + 8);
  if (length > kMaxHeader || bytes.size() - prefix < length) corrupt("the array's header is cut off");
  const std::string_view header(reinterpret_cast<const char*>(bytes.data() + prefix), length);
  std::string_view descr = field(header, "descr");
  if (descr.empty() || descr[0] != '\'') throw Error(ErrorCode::unsupported, "an array of records");
  descr.remove_prefix(1);
  const auto* const type =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const Type& t) { return descr == t.descr; });
  if (type == std::end(kTypes)) {
    throw Error(ErrorCode::unsupported, fmt::format("an array of type '{}'", descr.substr(0, 16)),
                "int32 is what selections are stored as");
  }
  Array array;
  array.dtype = type->dtype;
  array.shape = parse_shape(field(header, "shape"));
  const std::string_view order = field(header, "fortran_order");
  if (order.rfind("False", 0) != 0 && array.shape.size() > 1) {
    throw Error(ErrorCode::unsupported, "an array in Fortran order", "save it with numpy.ascontiguousarray");
  }
  array.data = bytes.data() + prefix + length;
  const std::uint64_t room =
      (bytes.size() - prefix - length) / static_cast<std::uint64_t>(block_bytes(array.dtype));
  std::uint64_t count = 1;
  for (const std::int64_t extent : array.shape) {
    if (extent != 0 &&
        count > std::numeric_limits<std::uint64_t>::max() / 16 / static_cast<std::uint64_t>(extent)) {
      corrupt("the array's shape is beyond all memory");
    }
    count *= static_cast<std::uint64_t>(extent);
  }
  if (count > room) corrupt("the array is shorter than its shape");
  array.owner = std::move(owner);
  return array;
}

std::string npy_header(DType dtype, std::span<const std::int64_t> shape) {
  const auto* const type =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const Type& t) { return t.dtype == dtype; });
  if (type == std::end(kTypes)) throw Error(ErrorCode::invalid_argument, "NumPy has no such type");
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}",
                                   type->descr, fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  header.append(63 - (header.size() + 10) % 64, ' ');
  header += '\n';
  const auto length = static_cast<std::uint16_t>(header.size());
  std::string out("\x93NUMPY\x01\x00", 8);
  out.append(reinterpret_cast<const char*>(&length), 2);
  return out + header;
}

NpzFile::NpzFile(const std::filesystem::path& path) : path_(path.string()) {
  file_ = std::make_shared<weights::MappedFile>(path);
  const std::byte* data = file_->data();
  const std::uint64_t size = file_->size();
  try {
    if (size < kEndBytes) corrupt("it is too short for a zip file");
    std::uint64_t end = size - kEndBytes;  // the end record is last but for a comment of up to 65535 bytes
    const std::uint64_t stop = end > 65535 ? end - 65535 : 0;
    while (at<std::uint32_t>(data + end) != kEndMagic) {
      if (end == stop) corrupt("it is no zip file: the end record is missing");
      --end;
    }
    std::uint64_t count = at<std::uint16_t>(data + end + 10), offset = at<std::uint32_t>(data + end + 16);
    if ((count == 0xffff || offset == kIn64) && end >= kLocatorBytes &&
        at<std::uint32_t>(data + end - kLocatorBytes) == kLocator64Magic) {
      const auto end64 = at<std::uint64_t>(data + end - kLocatorBytes + 8);
      if (end64 > size || size - end64 < kEnd64Bytes || at<std::uint32_t>(data + end64) != kEnd64Magic) {
        corrupt("the zip64 end record is missing");
      }
      count = at<std::uint64_t>(data + end64 + 32);
      offset = at<std::uint64_t>(data + end64 + 48);
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      if (offset > size || size - offset < kCentralBytes ||
          at<std::uint32_t>(data + offset) != kCentralMagic) {
        corrupt("the directory is cut off");
      }
      const std::byte* central = data + offset;
      const auto flags = at<std::uint16_t>(central + 8), method = at<std::uint16_t>(central + 10);
      const std::uint64_t name_bytes = at<std::uint16_t>(central + 28),
                          extra_bytes = at<std::uint16_t>(central + 30),
                          comment_bytes = at<std::uint16_t>(central + 32);
      if (size - offset - kCentralBytes < name_bytes + extra_bytes + comment_bytes)
        corrupt("the directory is cut off");
      std::string name(reinterpret_cast<const char*>(central + kCentralBytes), name_bytes);
      Entry entry{at<std::uint32_t>(central + 42), at<std::uint32_t>(central + 20),
                  at<std::uint32_t>(central + 24), at<std::uint32_t>(central + 16), method == 8};
      // The zip64 field holds those of the three that do not fit, in this order.
      const std::byte* extra = central + kCentralBytes + name_bytes;
      for (std::uint64_t used = 0; used + 4 <= extra_bytes;) {
        const auto kind = at<std::uint16_t>(extra + used), bytes = at<std::uint16_t>(extra + used + 2);
        if (used + 4 + bytes > extra_bytes) break;
        std::uint64_t from = used + 4;
        for (std::uint64_t* value : {&entry.bytes, &entry.packed_bytes, &entry.offset}) {
          if (kind != 1 || *value != kIn64 || from + 8 > used + 4 + bytes) continue;
          *value = at<std::uint64_t>(extra + from);
          from += 8;
        }
        used += 4u + bytes;
      }
      offset += kCentralBytes + name_bytes + extra_bytes + comment_bytes;
      if (name.size() < 4 || !name.ends_with(".npy")) continue;
      name.resize(name.size() - 4);
      if ((flags & 1) != 0 || (method != 0 && method != 8)) {
        throw Error(ErrorCode::unsupported,
                    fmt::format("'{}' is encrypted or packed by method {}", name, method));
      }
      // Behind the local header, whose name and extra field have lengths of their own.
      if (entry.offset > size || size - entry.offset < kLocalBytes ||
          at<std::uint32_t>(data + entry.offset) != kLocalMagic) {
        corrupt(fmt::format("'{}' is not where the directory says", name));
      }
      entry.offset += kLocalBytes + at<std::uint16_t>(data + entry.offset + 26) +
                      at<std::uint16_t>(data + entry.offset + 28);
      if (entry.offset > size || size - entry.offset < entry.packed_bytes ||
          (!entry.deflated && entry.packed_bytes != entry.bytes)) {
        corrupt(fmt::format("'{}' reaches beyond the file", name));
      }
      if (!entries_.emplace(name, entry).second) corrupt(fmt::format("'{}' is there twice", name));
    }
  } catch (const Error& error) {
    throw error.in(path_);
  }
}

std::vector<std::string> NpzFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

Array NpzFile::read_entry(const Entry& entry) const {
  const std::byte* packed = file_->data() + entry.offset;
  if (!entry.deflated) {
    constexpr std::uint64_t kStep = 1u << 26;
    std::uint32_t sum = 0;
    for (std::uint64_t at = 0; at < entry.bytes; at += kStep) {
      const std::uint64_t count = std::min(kStep, entry.bytes - at);
      sum = checksum(packed + at, count, sum);
      release_pages(packed + at, count);
    }
    if (sum != entry.checksum) corrupt("its checksum is wrong");
    Array array = parse_npy({packed, entry.bytes}, file_);
    array.mapped = true;
    return array;
  }
  auto bytes =
      std::make_shared<const std::vector<std::byte>>(inflate_all(packed, entry.packed_bytes, entry.bytes));
  if (checksum(bytes->data(), bytes->size()) != entry.checksum) corrupt("its checksum is wrong");
  return parse_npy(*bytes, bytes);
}

const NpzFile::Entry& NpzFile::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    throw Error(ErrorCode::not_found, fmt::format("{} has no array named '{}'", path_, name));
  }
  return found->second;
}

Array NpzFile::read(const std::string& name) const {
  const Entry& found = entry(name);
  try {
    return read_entry(found);
  } catch (const Error& error) {
    throw error.in(fmt::format("{}: '{}'", path_, name));
  }
}

struct NpzWriter::Entry {
  std::string name;
  std::uint64_t offset, packed_bytes, bytes;
  std::uint32_t checksum;
  bool deflated;
};

namespace {

Error cannot_write(const std::filesystem::path& path) {
  return Error(ErrorCode::io, fmt::format("cannot write {}: {}", path.string(), std::strerror(errno)));
}

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Sizes and offset always stand in the zip64 field, so that one shape serves every length.
std::string zip_header(const std::string& name, bool deflated, std::uint32_t crc, std::uint64_t packed,
                       std::uint64_t bytes, const std::uint64_t* central_offset) {
  std::string out;
  put<std::uint32_t>(out, central_offset != nullptr ? kCentralMagic : kLocalMagic);
  if (central_offset != nullptr) put<std::uint16_t>(out, 45);
  put<std::uint16_t>(out, 45);  // version: zip64
  put<std::uint16_t>(out, 0);
  put<std::uint16_t>(out, deflated ? 8 : 0);
  put<std::uint32_t>(out, 0x00210000);  // 1980-01-01: two runs give the same bytes
  put<std::uint32_t>(out, crc);
  put<std::uint32_t>(out, kIn64);
  put<std::uint32_t>(out, kIn64);
  put<std::uint16_t>(out, static_cast<std::uint16_t>(name.size()));
  put<std::uint16_t>(out, central_offset != nullptr ? 28 : 20);
  if (central_offset != nullptr) {
    put<std::uint16_t>(out, 0);
    put<std::uint16_t>(out, 0);
    put<std::uint16_t>(out, 0);
    put<std::uint32_t>(out, 0);
    put<std::uint32_t>(out, kIn64);
  }
  out += name;
  put<std::uint16_t>(out, 1);
  put<std::uint16_t>(out, central_offset != nullptr ? 24 : 16);
  put<std::uint64_t>(out, bytes);
  put<std::uint64_t>(out, packed);
  if (central_offset != nullptr) put<std::uint64_t>(out, *central_offset);
  return out;
}

}  // namespace

NpzWriter::NpzWriter(const std::filesystem::path& path)
    : path_(path), temporary_(fmt::format("{}.{}.tmp", path.string(), getpid())) {
  file_ = std::fopen(temporary_.c_str(), "wb");
  if (file_ == nullptr) throw cannot_write(path_);
}

NpzWriter::~NpzWriter() {
  if (file_ != nullptr) std::fclose(file_);
  if (!temporary_.empty()) std::remove(temporary_.c_str());
}

void NpzWriter::write(const void* data, std::size_t bytes) {
  if (std::fwrite(data, 1, bytes, file_) != bytes) throw cannot_write(path_);
  written_ += bytes;
}

void NpzWriter::add(const std::string& name, DType dtype, std::span<const std::int64_t> shape,
                    const void* data) {
  const std::string header = npy_header(dtype, shape);
  std::uint64_t bytes = static_cast<std::uint64_t>(block_bytes(dtype));
  for (const std::int64_t extent : shape) bytes *= static_cast<std::uint64_t>(extent);
  Entry entry{name + ".npy", written_, 0, header.size() + bytes, checksum(header.data(), header.size()),
              true};
  entry.checksum = checksum(data, bytes, entry.checksum);
  // The lengths are known only after packing: the header is written again then.
  write_local(entry);
  z_stream stream{};
  // Numbers pack little better at higher levels, and floats as well by runs of bytes alone, in a third of the time.
  constexpr int kLevel = 1, kMemory = 9;
  const int strategy = dtype == DType::f32 ? Z_RLE : Z_DEFAULT_STRATEGY;
  if (deflateInit2(&stream, kLevel, Z_DEFLATED, -MAX_WBITS, kMemory, strategy) != Z_OK) {
    throw Error(ErrorCode::internal, "zlib refused to start");
  }
  const std::uint64_t begin = written_;
  std::vector<Bytef> out(std::size_t{1} << 18);
  const auto pack = [&](const void* from, std::uint64_t count, bool last) {
    const auto* next = static_cast<const Bytef*>(from);
    do {
      const auto in = static_cast<uInt>(std::min<std::uint64_t>(count, 1u << 30));
      stream.next_in = const_cast<Bytef*>(next);
      stream.avail_in = in;
      count -= in;
      next += in;
      do {
        stream.next_out = out.data();
        stream.avail_out = static_cast<uInt>(out.size());
        deflate(&stream, last && count == 0 ? Z_FINISH : Z_NO_FLUSH);
        write(out.data(), out.size() - stream.avail_out);
      } while (stream.avail_out == 0);
    } while (count > 0);
  };
  try {
    pack(header.data(), header.size(), false);
    pack(data, bytes, true);
  } catch (...) {
    deflateEnd(&stream);
    throw;
  }
  deflateEnd(&stream);
  entry.packed_bytes = written_ - begin;
  if (fseeko(file_, static_cast<off_t>(entry.offset), SEEK_SET) != 0) throw cannot_write(path_);
  write_local(entry);
  if (fseeko(file_, 0, SEEK_END) != 0) throw cannot_write(path_);
  written_ = begin + entry.packed_bytes;
  entries_.push_back(std::move(entry));
}

void NpzWriter::write_local(const Entry& e) {
  const std::string local = zip_header(e.name, e.deflated, e.checksum, e.packed_bytes, e.bytes, nullptr);
  write(local.data(), local.size());
}

void NpzWriter::copy(const std::string& name, const NpzFile& from, const std::string& from_name) {
  const NpzFile::Entry& source = from.entry(from_name);
  const Entry entry{name + ".npy", written_,        source.packed_bytes,
                    source.bytes,  source.checksum, source.deflated};
  write_local(entry);
  write(from.file_->data() + source.offset, source.packed_bytes);
  entries_.push_back(entry);
}

void NpzWriter::add(const std::string& name, std::span<const std::int64_t> shape,
                    std::span<const float> values) {
  add(name, DType::f32, shape, values.data());
}
void NpzWriter::add(const std::string& name, std::span<const std::int64_t> shape,
                    std::span<const std::int32_t> values) {
  add(name, DType::i32, shape, values.data());
}
void NpzWriter::add(const std::string& name, std::span<const std::int64_t> values) {
  const std::int64_t shape[] = {static_cast<std::int64_t>(values.size())};
  add(name, DType::i64, shape, values.data());
}

void NpzWriter::finish() {
  const std::uint64_t begin = written_;
  for (const Entry& e : entries_) {
    const std::string central =
        zip_header(e.name, e.deflated, e.checksum, e.packed_bytes, e.bytes, &e.offset);
    write(central.data(), central.size());
  }
  const std::uint64_t end = written_;
  std::string tail;
  put<std::uint32_t>(tail, kEnd64Magic);
  put<std::uint64_t>(tail, kEnd64Bytes - 12);
  put<std::uint16_t>(tail, 45);
  put<std::uint16_t>(tail, 45);
  put<std::uint32_t>(tail, 0);
  put<std::uint32_t>(tail, 0);
  put<std::uint64_t>(tail, entries_.size());
  put<std::uint64_t>(tail, entries_.size());
  put<std::uint64_t>(tail, end - begin);
  put<std::uint64_t>(tail, begin);
  put<std::uint32_t>(tail, kLocator64Magic);
  put<std::uint32_t>(tail, 0);
  put<std::uint64_t>(tail, end);
  put<std::uint32_t>(tail, 1);
  put<std::uint32_t>(tail, kEndMagic);
  put<std::uint32_t>(tail, 0);
  put<std::uint16_t>(tail, 0xffff);
  put<std::uint16_t>(tail, 0xffff);
  put<std::uint32_t>(tail, kIn64);
  put<std::uint32_t>(tail, kIn64);
  put<std::uint16_t>(tail, 0);
  write(tail.data(), tail.size());
  if (std::fflush(file_) != 0 || fsync(fileno(file_)) != 0) throw cannot_write(path_);
  std::fclose(file_);
  file_ = nullptr;
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) throw cannot_write(path_);
  temporary_.clear();
}

}  // namespace basin::probe
