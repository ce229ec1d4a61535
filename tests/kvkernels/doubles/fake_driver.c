// A CUDA driver without a device: refuses what a real one refuses, and delays what a real one may delay.
//
// - Contexts are per thread, one primary context per ordinal. A call without a current context is error 201.
// - Modules and functions belong to the context that loaded them, streams to the context that made them: error 400.
// - After fake_kill, every call in a context of that device is error 700, for ever.
// - Host memory is registered by pages; a page may be registered once (712). Its device address is 2^40 above its own.
// - A copy from pageable host memory returns before its last 64 KiB have landed; a synchronization lands them.
// - Managed memory keeps a list of the hints that it gets.
// - A launch needs a kernel that fits the device's limit of shared memory (1). fake_kernels sets who runs it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
#define DEVICES 4
#define PAGE 4096UL
#define SHIFT (1ULL << 40)
#define LATE (64UL << 10)
#define RANGES 64

struct context { int ordinal; };
struct function { struct context* context; char name[128]; int shared_bytes; };
struct module { struct context* context; };
struct stream { struct context* context; };
struct allocation { int descriptor; size_t size; };
struct range { uintptr_t first, last; int used; };
struct hint { uint64_t address; size_t size; int kind, device; };
struct late { char* to; char* bytes; size_t size; struct late* next; };

static struct context contexts[DEVICES];
static int device_count, dead[DEVICES], shared_limit, initialized, refused, launches, registrations;
static int (*run)(const char*, const unsigned*, unsigned, unsigned, void*, void*);
static struct range ranges[RANGES];
static struct late* pending;
static struct hint hints[RANGES];
static int hint_count, unmanaged;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static __thread struct context* stack[16];
static __thread int depth;

static struct context* current(void) { return depth ? stack[depth - 1] : 0; }
static int usable(void) {
  if (!initialized) return NOT_INITIALIZED;
  if (!current()) { refused++; return INVALID_CONTEXT; }
  return dead[current()->ordinal] ? ILLEGAL_ADDRESS : OK;
}
#define USABLE { int error = usable(); if (error) return error; }
static void land(void) {
  pthread_mutex_lock(&guard);
  while (pending) {
    struct late* one = pending;
    pending = one->next;
    memcpy(one->to, one->bytes, one->size);
    free(one->bytes);
    free(one);
  }
  pthread_mutex_unlock(&guard);
}

// ---- what tests set and ask ----
void fake_reset(int devices, int shared_bytes) {
  land();
  device_count = devices, shared_limit = shared_bytes, run = 0;
  initialized = refused = launches = registrations = depth = 0;
  memset(dead, 0, sizeof dead);
  memset(ranges, 0, sizeof ranges);
  hint_count = unmanaged = 0;
}
void fake_kill(int ordinal) { dead[ordinal] = 1; }
void fake_revive(int ordinal) { dead[ordinal] = 0; }
void fake_kernels(void* launcher) { run = launcher; }
void fake_unmanaged(void) { unmanaged = 1; }
int fake_hints(struct hint* copy) { memcpy(copy, hints, sizeof hints); return hint_count; }
int fake_refused(void) { return refused; }
int fake_launches(void) { return launches; }
int fake_registrations(void) { return registrations; }
int fake_current(void) { return current() ? current()->ordinal : -1; }

// ---- devices and contexts ----
int cuInit(unsigned flags) {
  if (!device_count) return NO_DEVICE;
  initialized = 1;
  return OK;
}
int cuDriverGetVersion(int* version) { *version = 13000; return OK; }
int cuDeviceGetCount(int* count) { *count = device_count; return initialized ? OK : NOT_INITIALIZED; }
int cuDeviceGet(int* device, int ordinal) {
  if (!initialized) return NOT_INITIALIZED;
  if (ordinal < 0 || ordinal >= device_count) return INVALID_DEVICE;
  *device = ordinal;
  return OK;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  // 97: shared memory that a block may opt in to; 89: the device may use managed memory on the host
  *value = attribute == 97 ? shared_limit : attribute == 89 ? !unmanaged : 1;
  return OK;
}
int cuDeviceGetUuid_v2(char* uuid, int device) { memset(uuid, 'a' + device, 16); return OK; }
int cuDevicePrimaryCtxRetain(struct context** context, int device) {
  if (device < 0 || device >= device_count) return INVALID_DEVICE;
  if (dead[device]) return ILLEGAL_ADDRESS;
  contexts[device].ordinal = device;
  *context = &contexts[device];
  return OK;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuCtxSetCurrent(struct context* context) {
  if (depth) depth--;
  if (context) stack[depth++] = context;
  return OK;
}
int cuCtxGetCurrent(struct context** context) { *context = current(); return OK; }
int cuCtxPushCurrent_v2(struct context* context) { stack[depth++] = context; return OK; }
int cuCtxPopCurrent_v2(struct context** context) {
  if (!depth) return INVALID_CONTEXT;
  struct context* top = stack[--depth];
  if (context) *context = top;
  return OK;
}
int cuCtxGetDevice(int* device) { USABLE *device = current()->ordinal; return OK; }
int cuCtxSynchronize(void) { USABLE land(); return OK; }
int cuStreamCreate(struct stream** stream, unsigned flags) {
  USABLE *stream = malloc(sizeof **stream);
  (*stream)->context = current();
  return OK;
}
int cuStreamSynchronize(struct stream* stream) { USABLE land(); return OK; }

// ---- kernels ----
int cuModuleLoadData(struct module** module, const void* image) {
  USABLE *module = malloc(sizeof **module);
  (*module)->context = current();
  return OK;
}
int cuModuleUnload(struct module* module) { free(module); return OK; }
int cuModuleGetFunction(struct function** function, struct module* module, const char* name) {
  USABLE if (module->context != current()) return INVALID_HANDLE;
  if (strstr(name, "nonsense")) return NOT_FOUND;
  *function = calloc(1, sizeof **function);
  (*function)->context = module->context;
  (*function)->shared_bytes = 48 << 10;
  strncpy((*function)->name, name, sizeof (*function)->name - 1);
  return OK;
}
int cuFuncSetAttribute(struct function* function, int attribute, int value) {
  USABLE if (function->context != current()) return INVALID_HANDLE;
  if (attribute == 8 && value > shared_limit) return INVALID_VALUE;
  if (attribute == 8) function->shared_bytes = value;
  return OK;
}
int cuLaunchKernel(struct function* f, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared_bytes, struct stream* stream, void** arguments, void** extra) {
  USABLE if (f->context != current() || (stream && stream->context != current())) return INVALID_HANDLE;
  if ((int)shared_bytes > f->shared_bytes || !x || !y || !z || y > 65535 || z > 65535 || threads > 1024) return INVALID_VALUE;
  launches++;
  land();
  unsigned grid[3] = {x, y, z};
  return run ? run(f->name, grid, threads, shared_bytes, arguments[0], 0) : OK;
}

// ---- memory ----
int cuMemAlloc_v2(uint64_t* address, size_t size) {
  USABLE *address = (uint64_t)mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return OK;
}
int cuMemFree_v2(uint64_t address) { USABLE return OK; }
int cuMemAllocManaged(uint64_t* address, size_t size, unsigned flags) {
  if (flags != 1) return INVALID_VALUE;  // attached to all streams
  return size >> 45 ? OUT_OF_MEMORY : cuMemAlloc_v2(address, size);
}
static int hint(uint64_t address, size_t size, int kind, int device) {
  USABLE if (device < -1 || device >= device_count || hint_count == RANGES) return INVALID_VALUE;
  hints[hint_count++] = (struct hint){address, size, kind, device};
  return OK;
}
int cuMemAdvise(uint64_t address, size_t size, int kind, int device) { return hint(address, size, kind, device); }
int cuMemPrefetchAsync(uint64_t address, size_t size, int device, void* stream) { return hint(address, size, 0, device); }
static int overlaps(uintptr_t first, uintptr_t last) {
  for (int i = 0; i < RANGES; i++)
    if (ranges[i].used && first <= ranges[i].last && ranges[i].first <= last) return 1;
  return 0;
}
int cuMemHostRegister_v2(void* at, size_t size, unsigned flags) {
  USABLE uintptr_t first = (uintptr_t)at / PAGE, last = ((uintptr_t)at + size - 1) / PAGE;
  registrations++;
  if (overlaps(first, last)) return ALREADY_REGISTERED;
  for (int i = 0; i < RANGES; i++)
    if (!ranges[i].used) { ranges[i] = (struct range){first, last, 1}; return OK; }
  return INVALID_VALUE;
}
int cuMemHostUnregister(void* at) {
  USABLE for (int i = 0; i < RANGES; i++)
    if (ranges[i].used && ranges[i].first == (uintptr_t)at / PAGE) { ranges[i].used = 0; return OK; }
  return NOT_REGISTERED;
}
int cuMemHostGetDevicePointer_v2(uint64_t* address, void* at, unsigned flags) {
  USABLE if (!overlaps((uintptr_t)at / PAGE, (uintptr_t)at / PAGE)) return NOT_REGISTERED;
  *address = (uint64_t)at + SHIFT;
  return OK;
}
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t size) {
  USABLE size_t later = size < LATE ? size : LATE, now = size - later;
  memcpy((void*)to, from, now);
  struct late* one = malloc(sizeof *one);
  *one = (struct late){(char*)to + now, malloc(later), later, 0};
  memcpy(one->bytes, (const char*)from + now, later);
  pthread_mutex_lock(&guard);
  one->next = pending, pending = one;
  pthread_mutex_unlock(&guard);
  return OK;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t size) {
  USABLE land();
  memcpy(to, (void*)from, size);
  return OK;
}
int cuMemGetAllocationGranularity(size_t* step, const void* properties, int option) { *step = 2 << 20; return OK; }
int cuMemAddressReserve(uint64_t* address, size_t size, size_t alignment, uint64_t near, uint64_t flags) {
  *address = (uint64_t)mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return OK;
}
int cuMemAddressFree(uint64_t address, size_t size) { munmap((void*)address, size); return OK; }
int cuMemCreate(struct allocation** handle, size_t size, const void* properties, uint64_t flags) {
  *handle = malloc(sizeof **handle);
  (*handle)->descriptor = memfd_create("fake-device-memory", 0), (*handle)->size = size;
  return ftruncate((*handle)->descriptor, size) ? INVALID_VALUE : OK;
}
int cuMemRelease(struct allocation* handle) {
  close(handle->descriptor);
  free(handle);
  return OK;
}
int cuMemMap(uint64_t address, size_t size, size_t offset, struct allocation* handle, uint64_t flags) {
  void* got = mmap((void*)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->descriptor, offset);
  return got == MAP_FAILED ? INVALID_VALUE : OK;
}
int cuMemUnmap(uint64_t address, size_t size) {
  land();
  mmap((void*)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  return OK;
}
int cuMemSetAccess(uint64_t address, size_t size, const int* access, size_t count) {  // {type, ordinal, flags}: 1 read, 3 both
  if (access[1] >= device_count) return INVALID_DEVICE;
  return mprotect((void*)address, size, access[2] == 3 ? PROT_READ | PROT_WRITE : PROT_READ) ? INVALID_VALUE : OK;
}
int cuMemExportToShareableHandle(int* descriptor, struct allocation* handle, int type, uint64_t flags) {
  *descriptor = dup(handle->descriptor);
  return OK;
}
int cuMemImportFromShareableHandle(struct allocation** handle, void* descriptor, int type) {
  *handle = malloc(sizeof **handle);
  (*handle)->descriptor = dup((int)(intptr_t)descriptor), (*handle)->size = 0;
  return OK;
}

// ---- names ----
int cuGetErrorString(int error, const char** text) {
  *text = error == INVALID_CONTEXT ? "invalid device context" : error == INVALID_HANDLE ? "invalid resource handle"
        : error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : error == INVALID_VALUE ? "invalid argument"
        : "an error of the fake driver";
  return OK;
}
int cuGetErrorName(int error, const char** text) { return cuGetErrorString(error, text); }
int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, int* status) {
  char versioned[160];
  strcpy(versioned, name);
  strcat(versioned, "_v2");
  *found = dlsym(RTLD_DEFAULT, versioned);
  Dl_info us, them;
  dladdr((void*)cuInit, &us);
  if (!*found || !dladdr(*found, &them) || them.dli_fbase != us.dli_fbase) {
    void* self = dlopen(us.dli_fname, RTLD_NOLOAD | RTLD_NOW);
    *found = dlsym(self, versioned);
    if (!*found) *found = dlsym(self, name);
  }
  if (status) *status = *found ? 0 : 1;
  return *found ? OK : NOT_FOUND;
}
