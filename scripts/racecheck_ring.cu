// Which orders between warps does racecheck see? A ring of one place: a warp writes, another reads, and a barrier each
// way says when. Compute Sanitizer 2025.3 reports races where one lane arrives at an mbarrier for its warp after
// __syncwarp (1, 3, 4, 5), and none where every lane arrives (0, 2); with a third warp on the way back (2, 3, 5) or
// without, and whether a lane reads what another wrote or (4, 5) what its own counterpart did. With named barriers it
// reports races where the writer goes on with barrier.arrive (6, 7, 8), and none where it has waited at a barrier of its
// own before (9). See docs/checkers.md.
//
//     nvcc -arch=sm_90a -Icsrc -o racecheck_ring scripts/racecheck_ring.cu
//     compute-sanitizer --tool racecheck --racecheck-report analysis ./racecheck_ring 1
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"

template <bool kEveryLane>
__device__ void leave(uint64_t* barrier) {
    __syncwarp();
    if (kEveryLane || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

template <bool kEveryLane, bool kThird, int kOther = 5>
__global__ void ring(int* out) {
    __shared__ int data[32];
    __shared__ uint64_t full, read, empty;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, arrivals = kEveryLane ? 32 : 1;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&full, arrivals), ptx::mbarrier_init(&read, arrivals), ptx::mbarrier_init(&empty, arrivals);
    }
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < 4; ++i) {
        if (warp == 0) {
            ptx::mbarrier_wait(&empty, i % 2 ^ 1);
            data[lane] = i + lane;
            leave<kEveryLane>(&full);
        } else if (warp == 1) {
            ptx::mbarrier_wait(&full, i % 2);
            sum += data[lane ^ kOther];
            leave<kEveryLane>(kThird ? &read : &empty);
        } else if (kThird) {
            ptx::mbarrier_wait(&read, i % 2);
            leave<kEveryLane>(&empty);
        }
    }
    out[threadIdx.x] = sum;
}

// The same with named barriers, and a writer that stores from so many lanes: below 32, apart from the rest of its warp.
// kMeet: they meet before it arrives, kWait: at a named barrier of their own.
template <int kWriters, bool kMeet, bool kWait = false>
__global__ void named_ring(int* out) {
    __shared__ int data[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sum = 0;
    for (int i = 0; i < 4; ++i) {
        if (warp == 0) {
            if (i > 0) ptx::barrier_sync(2, 64);
            if (lane < kWriters) {
                for (int j = lane; j < 32; j += kWriters) data[j] = i + j;
            }
            if (kMeet) __syncwarp();
            if (kWait) ptx::barrier_sync(3, 32);
            ptx::barrier_arrive(1, 64);
        } else if (warp == 1) {
            ptx::barrier_sync(1, 64);
            sum += data[lane ^ 5];
            if (i < 3) ptx::barrier_arrive(2, 64);
        }
    }
    out[threadIdx.x] = sum;
}

int main(int count, char** arguments) {
    int* out = nullptr;
    cudaMalloc(&out, 96 * sizeof(int));
    switch (count > 1 ? atoi(arguments[1]) : 0) {
        case 0: ring<true, false><<<1, 96>>>(out); break;
        case 1: ring<false, false><<<1, 96>>>(out); break;
        case 2: ring<true, true><<<1, 96>>>(out); break;
        case 3: ring<false, true><<<1, 96>>>(out); break;
        case 4: ring<false, false, 0><<<1, 96>>>(out); break;
        case 5: ring<false, true, 0><<<1, 96>>>(out); break;
        case 6: named_ring<32, false><<<1, 96>>>(out); break;
        case 7: named_ring<16, false><<<1, 96>>>(out); break;
        case 8: named_ring<16, true><<<1, 96>>>(out); break;
        case 9: named_ring<32, false, true><<<1, 96>>>(out); break;
        default: return 2;
    }
    const cudaError_t error = cudaDeviceSynchronize();
    printf("%s\n", cudaGetErrorString(error));
    return error != cudaSuccess;
}
