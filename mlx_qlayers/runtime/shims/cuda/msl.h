// The Metal Shading Language in CUDA C++, for NVRTC behind mx.fast.cuda_kernel. MLX puts kernels
// into namespace mlx::core::cu, so this lives there too: its float4 hides CUDA's.
#pragma once

#include "types.h"
#include "vector.h"
#include "math.h"
#include "integer.h"
#include "simd.h"
#include "atomic.h"
#include "matrix.h"
#include "fragment.h"
#include "tile.h"
#include "tile_products.h"
#include "operands.h"
#include "arrival.h"
#include "tensor.h"
#include "warp_tensor.h"

namespace metal = ::mlx::core::cu;

#include "keywords.h"
