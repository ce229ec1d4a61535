// CUDA emulator: runs kernels block by block behind the C interface of cuda/launch.cu. One translation unit.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <random>
#include <vector>

#include "device.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

namespace emulator {

struct Barrier {
  int members = 0, arrived = 0;
  unsigned generation = 0;
  void release() { arrived = 0, generation++; }
};

struct Copy {
  void* to;
  const void* from;
  int group;
  void land() const {
    if (from) memcpy(to, from, 16);
    else memset(to, 0, 16);
  }
};

struct Fiber {
  void* stack_pointer = nullptr;
  std::vector<char> stack;
  bool done = false;
  const char* waits_at = nullptr;
  const Barrier* waits_for = nullptr;
  unsigned waits_since = 0;
  int parity = 0, group = 0;
  std::vector<Copy> copies;
  bool runnable() const { return !done && (!waits_for || waits_for->generation != waits_since); }
};

// State of the running block. Used by one thread at a time: kvk_launch holds a lock.
static std::mutex launching;
static std::vector<Fiber> fibers;
static std::vector<Barrier> warps;
static std::vector<Exchange> exchanges;  // [warp][parity]
static Barrier block;
static unsigned char* shared = nullptr;
static void* scheduler = nullptr;
static unsigned current = 0;
static Index block_at;
static enum Order { FIRST_WARP_FIRST, LAST_WARP_FIRST, RANDOM_ORDER } order;
static enum Landing { AT_WAIT, AT_ISSUE, AT_RANDOM } landing;
static std::minstd_rand dice;
static unsigned max_shared_bytes = ~0u;
static constexpr unsigned MAX_GRID_YZ = 65535;
static thread_local char error[400];
static const Registered* running = nullptr;
static const void* running_params = nullptr;

// Saves the callee-saved registers and switches to another stack.
#if defined(__x86_64__)
extern "C" void kvk_switch(void** save, void* load);
asm(R"(
.text
.globl kvk_switch
.type kvk_switch, @function
kvk_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size kvk_switch, .-kvk_switch
)");
#else
#error "the emulator switches stacks in x86-64 assembly; add your architecture here"
#endif

Index thread_index() { return {current, 0, 0}; }
Index block_index() { return block_at; }
unsigned char* shared_memory() { return shared; }

static void leave() { kvk_switch(&fibers[current].stack_pointer, scheduler); }

static void describe(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error, sizeof error, format, arguments);
  va_end(arguments);
}

// Ends the launch: the scheduler sees the error and never returns to this fiber.
#define FAULT(...) (emulator::describe(__VA_ARGS__), emulator::leave(), abort())

void require_aligned16(const void* address, const char* instruction) {
  if ((uintptr_t)address % 16) FAULT("misaligned address: %s of thread %u is not at a multiple of 16", instruction, current);
}

static void wait(Barrier& barrier, const char* name) {
  Fiber& fiber = fibers[current];
  if (++barrier.arrived >= barrier.members) return barrier.release();
  fiber.waits_at = name;
  fiber.waits_for = &barrier;
  fiber.waits_since = barrier.generation;
  leave();
  fiber.waits_for = nullptr;
}

void barrier_block() { wait(block, "sync_block"); }

Exchange& exchange() { return exchanges[current / 32 * 2 + fibers[current].parity]; }

void collective(void (*compute)(Exchange&)) {
  Barrier& warp = warps[current / 32];
  if (compute && warp.arrived + 1 >= warp.members) compute(exchange());
  wait(warp, "a warp operation");
  fibers[current].parity ^= 1;
}

void copy_later(void* to, const void* from) {
  const Copy copy{to, from, fibers[current].group};
  if (landing == AT_ISSUE) copy.land();
  else fibers[current].copies.push_back(copy);
}
static void land_some() {  // about half of some thread's copies
  std::vector<Copy>& copies = fibers[dice() % block.members].copies;
  auto lands = [](const Copy& copy) { return dice() % 2 && (copy.land(), true); };
  copies.erase(std::remove_if(copies.begin(), copies.end(), lands), copies.end());
}
void copies_commit() { fibers[current].group++; }
void copies_wait(int pending) {
  Fiber& fiber = fibers[current];
  std::vector<Copy> later;
  for (const Copy& copy : fiber.copies) {
    if (copy.group >= fiber.group - pending) later.push_back(copy);
    else copy.land();
  }
  fiber.copies.swap(later);
}

static void enter() {
  running->run(running_params);
  Fiber& fiber = fibers[current];
  fiber.done = true;
  // Threads that have returned no longer count at barriers.
  for (Barrier* barrier : {&block, &warps[current / 32]})
    if (--barrier->members > 0 && barrier->arrived >= barrier->members) barrier->release();
  leave();
  abort();
}

// Runs a warp's lanes: as far as possible, or each once at random. Returns whether any lane could run.
static bool run_warp(unsigned warp, unsigned threads) {
  unsigned lanes[32];
  for (unsigned l = 0; l < 32; l++) lanes[l] = warp * 32 + (order == LAST_WARP_FIRST ? 31 - l : l);
  if (order == RANDOM_ORDER) std::shuffle(lanes, lanes + 32, dice);
  bool any = false;
  for (bool moved = true; moved;) {
    moved = false;
    for (unsigned lane : lanes) {
      if (lane >= threads || !fibers[lane].runnable()) continue;
      if (landing == AT_RANDOM) land_some();
      moved = any = true;
      current = lane;
      kvk_switch(&scheduler, fibers[lane].stack_pointer);
      if (*error) return false;
    }
    if (order == RANDOM_ORDER) break;
  }
  return any;
}

static void run_block(unsigned threads) {
  constexpr size_t stack_bytes = 128 << 10;
  if (fibers.size() < threads) fibers.resize(threads);
  block = {(int)threads};
  warps.assign((threads + 31) / 32, Barrier{32});
  exchanges.resize(warps.size() * 2);
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.stack.resize(stack_bytes);
    ASAN_UNPOISON_MEMORY_REGION(fiber.stack.data(), stack_bytes);  // the previous block's frames never returned
    fiber.done = false;
    fiber.waits_for = nullptr;
    fiber.parity = fiber.group = 0;
    fiber.copies.clear();
    // A frame as kvk_switch leaves it: six registers, then the return address, on a stack aligned as after a call.
    void** top = (void**)(((uintptr_t)fiber.stack.data() + stack_bytes) & ~(uintptr_t)15) - 2;
    *top = (void*)enter;
    fiber.stack_pointer = top - 6;
    memset(top - 6, 0, 6 * sizeof(void*));
  }
  std::vector<unsigned> turns(warps.size());
  for (unsigned w = 0; w < turns.size(); w++) turns[w] = order == LAST_WARP_FIRST ? turns.size() - 1 - w : w;
  for (bool any = true; any && !*error;) {
    any = false;
    if (order == RANDOM_ORDER) std::shuffle(turns.begin(), turns.end(), dice);
    for (unsigned warp : turns) any |= run_warp(warp, threads);
  }
  for (unsigned i = 0; i < threads && !*error; i++)
    if (!fibers[i].done) describe("thread %u waits forever at %s", i, fibers[i].waits_at);
}

static const Registered*& head() {
  static const Registered* list = nullptr;
  return list;
}
Registered::Registered(const char* name, unsigned threads, void (*run)(const void*), size_t params_bytes)
    : name(name), threads(threads), run(run), params_bytes(params_bytes), next(head()) {
  head() = this;
}
static const Registered* find(const char* name) {
  for (const Registered* r = head(); r; r = r->next)
    if (!strcmp(r->name, name)) return r;
  return nullptr;
}

}  // namespace emulator

extern "C" {
int kvk_devices() { return 1; }
void kvk_schedule(int order, int landing, unsigned seed) {
  emulator::order = (emulator::Order)order, emulator::landing = (emulator::Landing)landing;
  emulator::dice.seed(seed);
}
void kvk_card(unsigned max_shared_bytes) { emulator::max_shared_bytes = max_shared_bytes; }

// The compiler calls this for a misaligned access (-fsanitize=alignment).
struct Place { const char* file; unsigned line, column; };
void __ubsan_handle_type_mismatch_v1(const Place* place, uintptr_t) {
  FAULT("misaligned address: an access of thread %u at %s:%u", emulator::current, place->file, place->line);
}
size_t kvk_params_bytes(const char* name) {
  const emulator::Registered* kernel = emulator::find(name);
  return kernel ? kernel->params_bytes : 0;
}
int kvk_launch(const char* name, const unsigned* grid, unsigned threads, unsigned shared_bytes, void* params, void*) {
  using namespace emulator;
  std::lock_guard<std::mutex> alone(launching);
  running = find(name);
  if (!running) return -1;
  running_params = params;
  *error = 0;
  if (!grid[0] || !grid[1] || !grid[2] || grid[1] > MAX_GRID_YZ || grid[2] > MAX_GRID_YZ)
    return describe("invalid argument: y and z of a grid are 1 to %u", MAX_GRID_YZ), -2;
  if (!threads || threads > running->threads)
    return describe("%u threads in a block; its launch bounds are %u", threads, running->threads), -2;
  if (shared_bytes > max_shared_bytes)
    return describe("%u bytes of shared memory for a block; this card has %u", shared_bytes, max_shared_bytes), -2;
  // Allocated at its exact size, so that the address sanitizer detects out-of-bounds accesses.
  shared = (unsigned char*)aligned_alloc(16, shared_bytes ? (shared_bytes + 15) / 16 * 16 : 16);
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) {
        block_at = {x, y, z};
        memset(shared, 0xff, shared_bytes);
        if (!*error) run_block(threads);
      }
  free(shared);
  return *error ? -2 : 0;
}
const char* kvk_error_string(int code) { return code == -1 ? "the emulator has no such kernel" : emulator::error; }
}

#include "../cuda/attention.cu"
#include "../cuda/awq_gemm.cu"
#include "../cuda/kv_pack.cu"
#include "../cuda/layer_rows.cu"
