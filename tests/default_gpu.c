/* Preloaded into a process, it gives MLX without a GPU a default device that is one.
 *
 * Arrays and graphs are made as on a machine that has it, errors included; nothing of them runs.
 * The names are those of mlx::core::gpu::is_available(), gpu::device_count() and
 * new_stream(Device), as C++ spells them.
 */
#include <dlfcn.h>

typedef struct { int type, index; } Device;
typedef struct { int index; Device device; } Stream;

int _ZN3mlx4core3gpu12is_availableEv(void) { return 1; }

int _ZN3mlx4core3gpu12device_countEv(void) { return 1; }

Stream _ZN3mlx4core10new_streamENS0_6DeviceE(Device device) {
  Stream on_gpu = {1000, device};
  if (device.type) return on_gpu;
  void* mlx = dlopen("libmlx.so", RTLD_NOLOAD | RTLD_LAZY);
  Stream (*on_cpu)(Device) = dlsym(mlx, "_ZN3mlx4core10new_streamENS0_6DeviceE");
  return on_cpu(device);
}
