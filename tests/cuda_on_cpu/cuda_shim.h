// Runs CUDA C++ kernels on the CPU, to test them without a GPU: build.py puts this file before a kernel file.
//
// A block's threads are fibres of one OS thread. A fibre runs until it waits: in __syncthreads, in a warp collective, or
// asleep. Who runs first is the schedule's choice (see run_block); a kernel must give the same under all of them. Where
// nobody can go on, the launch ends with a report of who waits where. Shared memory begins as 0xFF in every byte (NaN,
// -1), so does what a shuffle reads from a lane that takes no part.
#pragma once
#include <link.h>
#include <math.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define CUDA_ON_CPU 1
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static thread_local  // one block at a time runs in an OS thread
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define SHARED_DYNAMIC(T, name) T* const name = reinterpret_cast<T*>(cuda_on_cpu::current->shared)

// ------------------------------------------------------------------ types

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
#define CUDA_ON_CPU_VECTOR(T, name, bytes2, bytes4)                                             \
    struct alignas(bytes2) name##2 { T x, y; };                                                 \
    struct alignas(bytes4) name##4 { T x, y, z, w; };                                           \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                  \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_ON_CPU_VECTOR(float, float, 8, 16)
CUDA_ON_CPU_VECTOR(int, int, 8, 16)
CUDA_ON_CPU_VECTOR(unsigned, uint, 8, 16)
CUDA_ON_CPU_VECTOR(signed char, char, 2, 4)
CUDA_ON_CPU_VECTOR(unsigned char, uchar, 2, 4)
CUDA_ON_CPU_VECTOR(short, short, 4, 8)

struct __half { _Float16 value; };  // no operators: kernels convert in so many words
struct alignas(4) __half2 { __half x, y; };
typedef __half half;
typedef __half2 half2;

// ------------------------------------------------------------------ fibres

namespace cuda_on_cpu {

constexpr size_t STACK = 64 << 10;
constexpr unsigned MAX_THREADS = 1024, WARP = 32;
constexpr double LIMIT = 120;  // seconds that a launch may sleep

enum State { READY, ASLEEP, BARRIER, COLLECTIVE, DONE };
enum Collective { SYNCWARP, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, BALLOT };
inline const char* name_of(int collective) {
    static const char* const names[] = {"__syncwarp", "__shfl_sync", "__shfl_xor_sync",
                                        "__shfl_up_sync", "__shfl_down_sync", "a vote"};
    return names[collective];
}

struct Fibre {
    void* sp;
    uint3 thread;
    unsigned id;
    State state;
    unsigned mask;         // of the collective that it waits in
    int collective, from;  // from: the lane that it reads; negative: none
    alignas(16) unsigned char in[16], out[16];
#if !defined(__x86_64__)
    ucontext_t context;
#endif
};

struct Block {
    Fibre fibres[MAX_THREADS];
    Fibre* running;
    uint3 index;
    dim3 threads, grid;
    unsigned n, alive, at_barrier;
    unsigned live[MAX_THREADS / WARP], waiting[MAX_THREADS / WARP];  // a bit per lane; waiting: in a collective
    int votes, counted;  // of __syncthreads_count and its kin: collecting, last result
    char* shared;
    void* scheduler;
    void (*kernel)(void*);
    void* kernel_args;
    char* error;
    size_t error_size;
    double began;
    unsigned order[MAX_THREADS];
    uint64_t random;
    char* stacks;  // of MAX_THREADS fibres
    Block* next;   // of those that are free
#if !defined(__x86_64__)
    ucontext_t scheduler_context;
#endif
};
inline thread_local Block* current = nullptr;  // the only such variable that is not __shared__

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t);
#endif

inline double seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

inline void fail(Block& b, const char* format, ...) {
    if (b.error[0]) return;
    va_list args;
    va_start(args, format);
    vsnprintf(b.error, b.error_size, format, args);
    va_end(args);
}

#if defined(__x86_64__)
extern "C" void cuda_on_cpu_switch(void** save, void* to);
__asm__(
    ".text\n.globl cuda_on_cpu_switch\n.hidden cuda_on_cpu_switch\n.type cuda_on_cpu_switch,@function\n"
    "cuda_on_cpu_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
inline void to_scheduler(Block& b) { cuda_on_cpu_switch(&b.running->sp, b.scheduler); }
inline void to_fibre(Block& b) { cuda_on_cpu_switch(&b.scheduler, b.running->sp); }
#else
inline void to_scheduler(Block& b) { swapcontext(&b.running->context, &b.scheduler_context); }
inline void to_fibre(Block& b) { swapcontext(&b.scheduler_context, &b.running->context); }
#endif

// ------------------------------------------------------------------ waiting

inline void open_barrier(Block& b) {
    if (!b.alive || b.at_barrier != b.alive) return;
    b.at_barrier = 0;
    b.counted = b.votes;
    b.votes = 0;
    for (unsigned i = 0; i < b.n; i++)
        if (b.fibres[i].state == BARRIER) b.fibres[i].state = READY;
}

inline int barrier(int vote) {
    Block& b = *current;
    b.at_barrier++;
    b.votes += vote != 0;
    b.running->state = BARRIER;
    open_barrier(b);
    while (b.running->state == BARRIER) to_scheduler(b);
    return b.counted;
}

// Completes the collective that `one` waits in if all lanes of its mask that still live wait in the same one.
inline void open_collective(Block& b, const Fibre& one) {
    const unsigned w = one.id / WARP, mask = one.mask, part = mask & b.live[w];
    if (part & ~b.waiting[w]) return;
    Fibre* const warp = b.fibres + w * WARP;
    unsigned votes = 0;
    for (unsigned i = 0; i < WARP; i++) {
        if (!(part >> i & 1)) continue;
        if (warp[i].mask != mask || warp[i].collective != one.collective) return;
        votes |= unsigned(warp[i].in[0]) << i;
    }
    for (unsigned i = 0; i < WARP; i++) {
        if (!(part >> i & 1)) continue;
        Fibre& f = warp[i];
        f.state = READY;
        if (f.collective == BALLOT) memcpy(f.out, &votes, 4);
        else if (f.from >= 0 && (part >> f.from & 1)) memcpy(f.out, warp[f.from].in, 16);
        else memset(f.out, 0xFF, 16);
    }
    b.waiting[w] &= ~part;
}

inline unsigned lane() { return current->running->id & (WARP - 1); }

inline void collective(int which, unsigned mask, int from) {
    Block& b = *current;
    Fibre& f = *b.running;
    if (!(mask >> lane() & 1)) {
        fail(b, "thread %u calls %s with mask %08x, in which it is not", f.id, name_of(which), mask);
        for (;;) to_scheduler(b);
    }
    f.mask = mask, f.collective = which, f.from = from, f.state = COLLECTIVE;
    b.waiting[f.id / WARP] |= 1u << lane();
    open_collective(b, f);
    while (f.state == COLLECTIVE) to_scheduler(b);
}

template <class T>
inline T shuffle(int which, unsigned mask, T value, int from) {
    static_assert(sizeof(T) <= 16, "shuffle");
    Fibre& f = *current->running;
    memcpy(f.in, &value, sizeof(T));
    collective(which, mask, from);
    memcpy(&value, f.out, sizeof(T));
    return value;
}

inline unsigned ballot(unsigned mask, bool vote) {
    Fibre& f = *current->running;
    f.in[0] = vote;
    collective(BALLOT, mask, -1);
    unsigned votes;
    memcpy(&votes, f.out, 4);
    return votes;
}

inline void sleep() {
    Block& b = *current;
    b.running->state = ASLEEP;
    to_scheduler(b);
}

// ------------------------------------------------------------------ running a block

inline void fibre_main() {
    Block& b = *current;
    b.kernel(b.kernel_args);
    Fibre& f = *b.running;
    f.state = DONE;
    b.alive--;
    b.live[f.id / WARP] &= ~(1u << lane());
    open_barrier(b);
    for (unsigned i = 0; i < WARP; i++)
        if (b.waiting[f.id / WARP] >> i & 1) open_collective(b, b.fibres[f.id / WARP * WARP + i]);
    for (;;) to_scheduler(b);
}

inline void start_fibre(Block& b, unsigned i) {
    Fibre& f = b.fibres[i];
    char* stack = b.stacks + size_t(i) * STACK;
    f.id = i, f.state = READY;
    f.thread = {i % b.threads.x, i / b.threads.x % b.threads.y, i / (b.threads.x * b.threads.y)};
#if defined(__x86_64__)
    void** sp = reinterpret_cast<void**>(stack + STACK - 64 * (1 + i % 16));  // not all in the same cache sets
    *--sp = nullptr;
    *--sp = reinterpret_cast<void*>(&fibre_main);
    for (int k = 0; k < 6; k++) *--sp = nullptr;
    f.sp = sp;
#else
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stack, f.context.uc_stack.ss_size = STACK, f.context.uc_link = nullptr;
    makecontext(&f.context, &fibre_main, 0);
#endif
}

inline unsigned draw(Block& b, unsigned below) {
    b.random = b.random * 6364136223846793005ull + 1442695040888963407ull;
    return unsigned((b.random >> 33) % below);
}

inline void report_deadlock(Block& b) {
    char text[400] = "";
    for (unsigned i = 0, shown = 0; i < b.n && shown < 6;) {
        unsigned j = i + 1;
        auto same = [&](const Fibre& f, const Fibre& g) {
            return f.state == g.state &&
                   (f.state != COLLECTIVE || (f.mask == g.mask && f.collective == g.collective));
        };
        while (j < b.n && same(b.fibres[i], b.fibres[j])) j++;
        const Fibre& f = b.fibres[i];
        const size_t used = strlen(text);
        if (f.state == BARRIER) snprintf(text + used, sizeof(text) - used, " threads %u-%u in __syncthreads;", i, j - 1);
        if (f.state == COLLECTIVE)
            snprintf(text + used, sizeof(text) - used, " threads %u-%u in %s, mask %08x;", i, j - 1,
                     name_of(f.collective), f.mask);
        shown += f.state != DONE;
        i = j;
    }
    fail(b, "deadlock in block (%u, %u, %u), %u threads wait:%s", b.index.x, b.index.y, b.index.z, b.alive, text);
}

// Runs the ready fibres of order[first..last); -> how many.
inline unsigned run_ready(Block& b, unsigned first, unsigned last) {
    unsigned ran = 0;
    for (unsigned k = first; k < last && !b.error[0]; k++) {
        Fibre& f = b.fibres[b.order[k]];
        if (f.state != READY) continue;
        b.running = &f;
        to_fibre(b);
        ran++;
    }
    return ran;
}

// schedule 0: threads in turns, first to last. 1: last to first. 2: the first warp as far as it gets, then the next.
// 3: the last warp first, as far as it gets. More: in turns, in an order drawn anew each time.
inline void run_block(Block& b, unsigned schedule) {
    b.alive = b.n, b.at_barrier = 0, b.votes = 0;
    memset(b.live, 0, sizeof(b.live));
    memset(b.waiting, 0, sizeof(b.waiting));
    for (unsigned i = 0; i < b.n; i++) {
        start_fibre(b, i);
        b.live[i / WARP] |= 1u << i % WARP;
        b.order[i] = schedule % 2 && schedule < 4 ? b.n - 1 - i : i;
    }
    const bool greedy = schedule == 2 || schedule == 3;
    while (b.alive && !b.error[0]) {
        unsigned ran = 0;
        if (schedule > 3)
            for (unsigned i = b.n - 1; i > 0; i--) {
                const unsigned j = draw(b, i + 1), t = b.order[i];
                b.order[i] = b.order[j], b.order[j] = t;
            }
        for (unsigned k = 0; k < b.n && !(greedy && ran); k += WARP) ran += run_ready(b, k, k + WARP < b.n ? k + WARP : b.n);
        if (ran || !b.alive) continue;
        bool slept = false;
        for (unsigned i = 0; i < b.n; i++)
            if (b.fibres[i].state == ASLEEP) b.fibres[i].state = READY, slept = true;
        if (!slept) report_deadlock(b);
        else if (seconds() - b.began > LIMIT) fail(b, "still asleep after %.0f s", LIMIT);
        else sched_yield();
    }
}

// __shared__ variables are the library's thread-local segment, with `current` among them; -> that of this thread.
struct Segment { char* data; size_t size; };
inline Segment shared_segment() {
    Segment found{nullptr, 0};
    auto visit = [](dl_phdr_info* info, size_t, void* result) {
        char* here = reinterpret_cast<char*>(&current);
        for (int i = 0; i < info->dlpi_phnum; i++) {
            char* data = static_cast<char*>(info->dlpi_tls_data);
            const size_t size = info->dlpi_phdr[i].p_memsz;
            if (info->dlpi_phdr[i].p_type != PT_TLS || !data || here < data || here >= data + size) continue;
            *static_cast<Segment*>(result) = {data, size};
            return 1;
        }
        return 0;
    };
    dl_iterate_phdr(visit, &found);
    return found;
}

// Blocks with their stacks are used again: touching new pages costs more than running a small kernel.
inline Block* free_blocks = nullptr;
inline bool free_blocks_lock = false;
inline Block* take_block() {
    while (__atomic_test_and_set(&free_blocks_lock, __ATOMIC_ACQUIRE)) sched_yield();
    Block* b = free_blocks;
    if (b) free_blocks = b->next;
    __atomic_clear(&free_blocks_lock, __ATOMIC_RELEASE);
    if (b) return b;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* stacks = mmap(nullptr, MAX_THREADS * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
    b = static_cast<Block*>(calloc(1, sizeof(Block)));
    if (!b || stacks == MAP_FAILED) abort();
    b->stacks = static_cast<char*>(stacks);
    return b;
}
inline void give_block(Block* b) {
    while (__atomic_test_and_set(&free_blocks_lock, __ATOMIC_ACQUIRE)) sched_yield();
    b->next = free_blocks;
    free_blocks = b;
    __atomic_clear(&free_blocks_lock, __ATOMIC_RELEASE);
}

template <class... A, size_t... I>
inline void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*reinterpret_cast<std::remove_reference_t<A>*>(args[I])...);
}
template <class... A>
struct Call {
    void (*kernel)(A...);
    void** args;
    static void run(void* self) {
        const Call* c = static_cast<Call*>(self);
        call(c->kernel, c->args, std::index_sequence_for<A...>{});
    }
};

// -> 0, or 1 with a message in `error`.
template <class... A>
int launch(void (*kernel)(A...), const unsigned* grid, const unsigned* threads, size_t shared, void** args,
           unsigned schedule, char* error, size_t error_size) {
    Call<A...> job{kernel, args};
    void* dynamic = nullptr;
    error[0] = 0;
    if (posix_memalign(&dynamic, 128, shared ? shared : 1)) abort();
    Block* const b = take_block();
    b->n = threads[0] * threads[1] * threads[2];
    b->error = error, b->error_size = error_size;
    b->threads = {threads[0], threads[1], threads[2]}, b->grid = {grid[0], grid[1], grid[2]};
    b->kernel = &Call<A...>::run, b->kernel_args = &job, b->began = seconds();
    b->shared = static_cast<char*>(dynamic), b->random = schedule * 0x9E3779B97F4A7C15ull + 1;
    const Segment segment = shared_segment();
    const uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    const uint64_t shift = schedule > 3 ? draw(*b, unsigned(blocks)) : 0;
    for (uint64_t k = 0; k < blocks && !error[0]; k++) {
        const uint64_t i = schedule % 2 ? blocks - 1 - k : (k + shift) % blocks;
        b->index = {unsigned(i % grid[0]), unsigned(i / grid[0] % grid[1]), unsigned(i / grid[0] / grid[1])};
        memset(dynamic, 0xFF, shared);
        memset(segment.data, 0xFF, segment.size);
        current = b;
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(b->stacks, b->n * STACK);  // the last block's frames were left, not returned from
#endif
        run_block(*b, schedule);
    }
    current = nullptr;
    give_block(b);
    free(dynamic);
    return error[0] != 0;
}
}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_EXPORT(kernel)                                                                                    \
    extern "C" __attribute__((visibility("default"))) int launch_##kernel(                                            \
        const unsigned* grid, const unsigned* threads, size_t shared, void** args, unsigned schedule, char* error,    \
        size_t error_size) {                                                                                          \
        return cuda_on_cpu::launch(&kernel, grid, threads, shared, args, schedule, error, error_size);                \
    }

// ------------------------------------------------------------------ what kernels call

#define threadIdx (cuda_on_cpu::current->running->thread)
#define blockIdx (cuda_on_cpu::current->index)
#define blockDim (cuda_on_cpu::current->threads)
#define gridDim (cuda_on_cpu::current->grid)
#define warpSize 32

inline void __syncthreads() { cuda_on_cpu::barrier(0); }
inline int __syncthreads_count(int p) { return cuda_on_cpu::barrier(p); }
inline int __syncthreads_or(int p) { return cuda_on_cpu::barrier(p) != 0; }
inline int __syncthreads_and(int p) { return cuda_on_cpu::barrier(!p) == 0; }
inline void __syncwarp(unsigned mask = ~0u) { cuda_on_cpu::collective(cuda_on_cpu::SYNCWARP, mask, -1); }
// Widths split a warp into equal parts; what would come from outside the part comes from the lane itself.
template <class T> inline T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
    const int lane = int(cuda_on_cpu::lane()), part = lane & ~(width - 1);
    return cuda_on_cpu::shuffle(cuda_on_cpu::SHUFFLE, mask, v, part | (from & (width - 1)));
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T v, int x, int width = 32) {
    const int lane = int(cuda_on_cpu::lane()), from = lane ^ x;
    return cuda_on_cpu::shuffle(cuda_on_cpu::SHUFFLE_XOR, mask, v, from < (lane & ~(width - 1)) + width ? from : lane);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
    const int lane = int(cuda_on_cpu::lane()), at = lane & (width - 1);
    return cuda_on_cpu::shuffle(cuda_on_cpu::SHUFFLE_UP, mask, v, at >= int(by) ? lane - int(by) : lane);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
    const int lane = int(cuda_on_cpu::lane()), at = lane & (width - 1);
    return cuda_on_cpu::shuffle(cuda_on_cpu::SHUFFLE_DOWN, mask, v, at + int(by) < width ? lane + int(by) : lane);
}
inline unsigned __ballot_sync(unsigned mask, int p) { return cuda_on_cpu::ballot(mask, p != 0); }
inline int __any_sync(unsigned mask, int p) { return cuda_on_cpu::ballot(mask, p != 0) != 0; }
inline int __all_sync(unsigned mask, int p) { return cuda_on_cpu::ballot(mask, p == 0) == 0; }

inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { cuda_on_cpu::sleep(); }
inline long long clock64() { return (long long)(1e9 * cuda_on_cpu::seconds()); }
// Sleeps, so that a loop which polls lets others run.
template <class T> inline T load_acquire_system(const T* p) {
    cuda_on_cpu::sleep();
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <class T> inline void store_release_system(T* p, std::common_type_t<T> v) {
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline float load_system(const float* p) { return *const_cast<const volatile float*>(p); }

template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldlu(const T* p) { return *p; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline T atomicAdd(T* p, std::common_type_t<T> v) {
    if constexpr (std::is_same_v<T, float>) {  // no two fibres run at once, but kernels of two streams may
        unsigned old = __atomic_load_n(reinterpret_cast<unsigned*>(p), __ATOMIC_SEQ_CST), next;
        float f;
        do {
            memcpy(&f, &old, 4);
            const float sum = f + v;
            memcpy(&next, &sum, 4);
        } while (!__atomic_compare_exchange_n(reinterpret_cast<unsigned*>(p), &old, next, false, __ATOMIC_SEQ_CST,
                                              __ATOMIC_SEQ_CST));
        return f;
    } else {
        return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
    }
}
template <class T> inline T atomicOr(T* p, std::common_type_t<T> v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
template <class T> inline T atomicAnd(T* p, std::common_type_t<T> v) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); }
template <class T> inline T atomicExch(T* p, std::common_type_t<T> v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
template <class T> inline T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> v) {
    T old = expected;
    __atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return old;
}
template <class T> inline T atomicMax(T* p, std::common_type_t<T> v) {
    T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return old;
}

// ---- numbers

inline float __half2float(__half h) { return float(h.value); }
inline __half __float2half(float f) { return {_Float16(f)}; }
inline __half __float2half_rn(float f) { return {_Float16(f)}; }
inline float2 __half22float2(__half2 h) { return {float(h.x.value), float(h.y.value)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __float22half2_rn(float2 f) { return __floats2half2_rn(f.x, f.y); }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline float __low2float(__half2 h) { return float(h.x.value); }
inline float __high2float(__half2 h) { return float(h.y.value); }

template <class To, class From> inline To __bits(From v) {
    static_assert(sizeof(To) == sizeof(From), "bits");
    To to;
    memcpy(&to, &v, sizeof(to));
    return to;
}
inline unsigned short __half_as_ushort(__half h) { return __bits<unsigned short>(h); }
inline __half __ushort_as_half(unsigned short u) { return __bits<__half>(u); }
inline unsigned __float_as_uint(float f) { return __bits<unsigned>(f); }
inline int __float_as_int(float f) { return __bits<int>(f); }
inline float __uint_as_float(unsigned u) { return __bits<float>(u); }
inline float __int_as_float(int i) { return __bits<float>(i); }

template <class T> inline T min(T a, std::common_type_t<T> b) { return a < b ? a : b; }
template <class T> inline T max(T a, std::common_type_t<T> b) { return a > b ? a : b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
#define __expf(x) expf(x)  // the C library has functions of these names
#define __logf(x) logf(x)
#define __powf(x, y) powf(x, y)
#define __fsqrt_rn(x) sqrtf(x)
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __float2int_rn(float f) {  // a GPU saturates, and takes NaN for 0
    return f != f ? 0 : f >= 0x1p31f ? INT32_MAX : f < -0x1p31f ? INT32_MIN : int(rintf(f));
}
inline int __float2int_rz(float f) { return int(f); }
inline float __int2float_rn(int i) { return float(i); }
inline float __uint2float_rn(unsigned i) { return float(i); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(((unsigned long long)a * b) >> 32); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
    const unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned s = select >> (4 * i) & 15;
        unsigned byte = unsigned(both >> (8 * (s & 7))) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << (8 * i);
    }
    return r;
}
// Four bytes at once.
template <class F> inline unsigned __each_byte(unsigned a, unsigned b, F f) {
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) r |= (unsigned(f(a >> i & 255, b >> i & 255)) & 255) << i;
    return r;
}
inline unsigned __vadd4(unsigned a, unsigned b) { return __each_byte(a, b, [](int x, int y) { return x + y; }); }
inline unsigned __vsub4(unsigned a, unsigned b) { return __each_byte(a, b, [](int x, int y) { return x - y; }); }
inline unsigned __vsubss4(unsigned a, unsigned b) {
    return __each_byte(a, b, [](int x, int y) {
        const int d = int((signed char)x) - int((signed char)y);
        return d < -128 ? -128 : d > 127 ? 127 : d;
    });
}
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += int((signed char)(a >> i)) * int((signed char)(b >> i));
    return sum;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 32; i += 8) sum += (a >> i & 255) * (b >> i & 255);
    return sum;
}
