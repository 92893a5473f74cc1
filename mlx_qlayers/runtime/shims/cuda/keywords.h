// The words of the Metal Shading Language that CUDA C++ lacks. Included last: they are macros.
#pragma once

// One address space: the checked host backend is the judge of these. The launcher writes
// __shared__ where a kernel's body declares a threadgroup variable.
#define device
#define constant const
#define threadgroup
#define thread
#define METAL_FUNC __forceinline__
#define MLX_MTL_CONST static constexpr const

// Another type in each line that names it, so that no two operations share their shared memory.
#define execution_simdgroup execution_simdgroups<1, __LINE__>

// MLX writes the signature and the template's types with CUDA's names.
#define __half half
#define __nv_bfloat16 bfloat
#define Limits MetalLimits

// Bounds the registers, so that the launch cannot fail and the compiler need not guess.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(MSL_GROUP_SIZE, MSL_RESIDENT)
