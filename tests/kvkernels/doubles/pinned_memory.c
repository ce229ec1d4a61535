// Pinned memory that a device writes: io_uring's fixed buffers pin pages (FOLL_LONGTERM) as cudaHostRegister does. Writes
// reach the pages of the moment of pinning, whatever a mapping shows meanwhile.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/io_uring.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct pin {
  int ring;
  struct io_uring_params p;
  char *submissions, *completions;
  struct io_uring_sqe* entries;
};

// Pins a range. Returns 0 or the error number; `out` is for the other calls.
int pin_range(void* at, size_t size, struct pin** out) {
  struct pin* pin = calloc(1, sizeof *pin);
  pin->ring = syscall(SYS_io_uring_setup, 4, &pin->p);
  if (pin->ring < 0) return errno;
  const struct io_sqring_offsets* sq = &pin->p.sq_off;
  const struct io_cqring_offsets* cq = &pin->p.cq_off;
  pin->submissions = mmap(0, sq->array + pin->p.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED, pin->ring, IORING_OFF_SQ_RING);
  pin->completions = mmap(0, cq->cqes + pin->p.cq_entries * sizeof(struct io_uring_cqe), PROT_READ | PROT_WRITE, MAP_SHARED,
                          pin->ring, IORING_OFF_CQ_RING);
  pin->entries = mmap(0, pin->p.sq_entries * sizeof *pin->entries, PROT_READ | PROT_WRITE, MAP_SHARED, pin->ring, IORING_OFF_SQES);
  struct iovec range = {at, size};
  *out = pin;
  return syscall(SYS_io_uring_register, pin->ring, IORING_REGISTER_BUFFERS, &range, 1) < 0 ? errno : 0;
}

// Copies between a file's beginning and pinned memory, as a device does. Returns the bytes or a negative error number.
long pin_copy(struct pin* pin, void* at, int file, size_t size, int to_memory) {
  unsigned mask = *(unsigned*)(pin->submissions + pin->p.sq_off.ring_mask);
  unsigned tail = *(unsigned*)(pin->submissions + pin->p.sq_off.tail);
  struct io_uring_sqe* entry = &pin->entries[tail & mask];
  memset(entry, 0, sizeof *entry);
  entry->opcode = to_memory ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
  entry->fd = file, entry->addr = (unsigned long)at, entry->len = size;
  ((unsigned*)(pin->submissions + pin->p.sq_off.array))[tail & mask] = tail & mask;
  __atomic_store_n((unsigned*)(pin->submissions + pin->p.sq_off.tail), tail + 1, __ATOMIC_RELEASE);
  if (syscall(SYS_io_uring_enter, pin->ring, 1, 1, IORING_ENTER_GETEVENTS, 0, 0) < 0) return -errno;
  unsigned head = *(unsigned*)(pin->completions + pin->p.cq_off.head);
  unsigned cq_mask = *(unsigned*)(pin->completions + pin->p.cq_off.ring_mask);
  long done = ((struct io_uring_cqe*)(pin->completions + pin->p.cq_off.cqes))[head & cq_mask].res;
  __atomic_store_n((unsigned*)(pin->completions + pin->p.cq_off.head), head + 1, __ATOMIC_RELEASE);
  return done;
}

void pin_release(struct pin* pin) {
  close(pin->ring);
  free(pin);
}
