// What a CPU build of PyTorch lacks for tensors that say they are on cuda:0: a device guard, whose
// one stream is the default one, and the hooks by which autograd and generators find the device.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

static c10::Device gpu() { return c10::Device(c10::DeviceType::CUDA, 0); }
static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, gpu()); }

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return gpu(); }
  c10::Device getDevice() const override { return gpu(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

// Draws as the CPU's generator does, but says that it is the GPU's
struct Generator : at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed) : at::CPUGeneratorImpl(seed) { device_ = gpu(); }
};

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(kCPU); }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<::Generator>(0);
  }
  void deviceSynchronize(DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
