// Registry of kernels by name, filled when the library loads.
#pragma once
#include <cstddef>

namespace kvk {
struct Registered {
  const char* name;
  const void* function;
  size_t params_bytes;
  const Registered* next;
  Registered(const char* name, const void* function, size_t params_bytes);
};
const Registered* find(const char* name);
const Registered* first();
}  // namespace kvk
