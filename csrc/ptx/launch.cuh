// Launches of one stream that overlap (sm_90): a launch that is allowed to begins as blocks of the one before leave.
#pragma once

namespace ptx {

// From this block's side the next launch may begin.
__device__ __forceinline__ void allow_next_launch() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the launch before is complete and what it wrote is there. Where this one was not allowed to begin early,
// that has been so from the start.
__device__ __forceinline__ void wait_for_previous_launch() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace ptx
