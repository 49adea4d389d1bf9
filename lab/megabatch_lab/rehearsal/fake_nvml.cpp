// A fake libnvidia-ml: the state of its GPUs is read from the file FAKE_NVML in every call.
//
// One line per GPU: UUID, utilisation in %, power in mW, clock in MHz, throttle reasons, temperature, ECC errors, Xids.
// A negative number stands for a value that the GPU does not support.
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {
enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10 };
enum Column { UTILISATION, POWER, CLOCK, REASONS, TEMPERATURE, ECC, XIDS };
std::map<std::string, long> xids_sent;

std::vector<long> state_of(const std::string& uuid) {
  std::ifstream file(std::getenv("FAKE_NVML"));
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    std::vector<long> values;
    for (long value; words >> value;) values.push_back(value);
    if (name == uuid) return values;
  }
  return {};
}

template <class Value>
int answer(void* device, Column column, Value* value) {
  const long found = state_of(*static_cast<std::string*>(device)).at(column);
  if (found < 0) return NOT_SUPPORTED;
  *value = found;
  return SUCCESS;
}
}  // namespace

extern "C" {
struct Utilization {
  unsigned gpu, memory;
};
struct EventData {
  void* device;
  unsigned long long kind, data;
  unsigned gpu_instance, compute_instance;
};

int nvmlInit_v2() { return std::getenv("FAKE_NVML") ? SUCCESS : 9; }  // 9: the driver is not loaded
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  if (state_of(uuid).empty()) return NOT_FOUND;
  *device = new std::string(uuid);
  return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(void* device, Utilization* use) { return answer(device, UTILISATION, &use->gpu); }
int nvmlDeviceGetPowerUsage(void* device, unsigned* power) { return answer(device, POWER, power); }
int nvmlDeviceGetClockInfo(void* device, int kind, unsigned* clock) {
  return kind == 1 ? answer(device, CLOCK, clock) : NOT_SUPPORTED;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* reasons) {
  return answer(device, REASONS, reasons);
}
int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* degrees) { return answer(device, TEMPERATURE, degrees); }
int nvmlDeviceGetTotalEccErrors(void* device, int kind, int counter, unsigned long long* count) {
  return kind == 1 && counter == 0 ? answer(device, ECC, count) : NOT_SUPPORTED;
}
int nvmlEventSetCreate(void** events) { return *events = new std::string, SUCCESS; }
int nvmlDeviceRegisterEvents(void* device, unsigned long long kinds, void* events) {
  if (kinds != 8) return NOT_SUPPORTED;
  *static_cast<std::string*>(events) = *static_cast<std::string*>(device);
  return SUCCESS;
}
int nvmlEventSetWait_v2(void* events, EventData* data, unsigned) {
  const auto& uuid = *static_cast<std::string*>(events);
  if (xids_sent[uuid] >= state_of(uuid).at(XIDS)) return TIMEOUT;
  ++xids_sent[uuid];
  data->kind = 8, data->data = 79;  // "GPU has fallen off the bus"
  return SUCCESS;
}
}
