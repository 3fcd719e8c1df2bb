// Grids that start before the one they depend on has ended (programmatic dependent launch).
#pragma once

namespace basin::attention::sm90 {

/// Lets the grid that depends on this one start once every CTA has said so or ended. It says nothing about memory.
__device__ __forceinline__ void grid_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Waits until the grid that this one depends on has ended and its writes are there. Every CTA must call it, even one without
/// work, or this grid could end before the other.
__device__ __forceinline__ void grid_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace basin::attention::sm90
