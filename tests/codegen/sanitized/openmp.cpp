// What kernels ask of OpenMP, in calls that a sanitizer knows. Threads take one iteration
// at a time, and nothing but barriers and the end of a region orders what they do: shares
// are taken with relaxed atomics.
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static const int LOOPS = 256;
struct Team {
  void (*run)(void*);
  void* data;
  int size;
  pthread_barrier_t barrier;
  long taken[LOOPS];
};
struct Member { Team* team; int number; };
static thread_local Team* team;
static thread_local int number;
static thread_local int loop = -1;  // of a region, as each member counts them
static thread_local long begin, end, step;
static thread_local unsigned state;

extern "C" {
int omp_get_thread_num() { return team ? number : 0; }
int omp_get_num_threads() { return team ? team->size : 1; }
int omp_get_max_threads() { return omp_get_num_threads(); }
bool omp_in_parallel() { return team && team->size > 1; }

static void* member(void* given) {
  Member* m = (Member*)given;
  team = m->team, number = m->number, loop = -1, state = 2654435761u * (number + 1);
  team->run(team->data);
  team = 0;
  return 0;
}

void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned) {
  Team* t = (Team*)calloc(1, sizeof(Team));
  t->run = run, t->data = data, t->size = threads ? threads : 1;
  pthread_barrier_init(&t->barrier, 0, t->size);
  Member* members = (Member*)calloc(t->size, sizeof(Member));
  pthread_t* others = (pthread_t*)calloc(t->size, sizeof(pthread_t));
  for (int k = 0; k < t->size; ++k) members[k].team = t, members[k].number = k;
  for (int k = 1; k < t->size; ++k)
    if (pthread_create(&others[k], 0, member, &members[k])) abort();
  member(&members[0]);
  for (int k = 1; k < t->size; ++k) pthread_join(others[k], 0);
  pthread_barrier_destroy(&t->barrier);
  free(others), free(members), free(t);
}

void GOMP_barrier() { pthread_barrier_wait(&team->barrier); }

static bool take(long* first, long* last) {
  state = state * 1664525u + 1013904223u;
  if (state >> 30 == 0) sched_yield();
  const long k = __atomic_fetch_add(&team->taken[loop], 1, __ATOMIC_RELAXED);
  *first = begin + k * step;
  *last = *first + step;
  return step > 0 ? *first < end : *first > end;
}
static bool open(long from, long to, long by, long* first, long* last) {
  if (++loop >= LOOPS) { fputs("too many loops\n", stderr); abort(); }
  begin = from, end = to, step = by;
  return take(first, last);
}

#define LOOP(kind)                                                                      \
  bool GOMP_loop_##kind##_start(long from, long to, long by, long, long* first,         \
                                long* last) {                                           \
    return open(from, to, by, first, last);                                             \
  }                                                                                     \
  bool GOMP_loop_##kind##_next(long* first, long* last) { return take(first, last); }
LOOP(dynamic)
LOOP(guided)
LOOP(nonmonotonic_dynamic)
LOOP(nonmonotonic_guided)
void GOMP_loop_end_nowait() {}
void GOMP_loop_end() { GOMP_barrier(); }
}
