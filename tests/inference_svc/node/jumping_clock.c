// The system's clock, moved by the seconds in the file that JUMPING_CLOCK names, for processes with this in LD_PRELOAD.
// Clocks that count from the machine's start are as they are.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t* moved;

__attribute__((constructor)) static void open_file(void) {
  const char* name = getenv("JUMPING_CLOCK");
  int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void* found = mmap(0, sizeof *moved, PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) moved = found;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(clock, now);
  if (!failed && moved && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *moved;
  return failed;
}

int gettimeofday(struct timeval* now, void* zone) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec, now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
