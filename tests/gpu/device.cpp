// What a torch without a GPU lacks to accept tensors on `cuda:0`: somebody who knows about devices and streams of that
// type. There is one device, and nothing ever has to be waited for. Nothing here computes.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::CUDA;

class OneDevice final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return {kType, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

const c10::impl::DeviceGuardImplRegistrar registered(kType, new OneDevice);

}  // namespace

// A CUDA build of torch registers its own when it is imported; called after that.
extern "C" void register_device() {
  c10::impl::registerDeviceGuard(kType, new OneDevice);
}

// In place of torch's own, which knows when it is compiled that there are no GPUs: this library is loaded before it.
// Backward asks.
std::optional<c10::DeviceType> at::accelerator::getAccelerator(bool) {
  return kType;
}

namespace at {

// Torch asks for hooks of this name.
class CUDAHooks final : public CUDAHooksInterface {
 public:
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

const std::string name = "CUDAHooks";
// Preferred to those of a CUDA build, which come later.
const RegistererCUDAHooksRegistry hooks(
    name, c10::REGISTRY_PREFERRED, CUDAHooksRegistry(), RegistererCUDAHooksRegistry::DefaultCreator<CUDAHooks>);

}  // namespace at
