// The threads that run one pass together: torch's own, so that no second pool competes for the
// cores, in one parallel region from the first layer to the last.
#pragma once

#include <atomic>
#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace polybasic {

// Functions of the OpenMP runtime that torch has loaded.
struct OpenMp {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
    int (*thread_number)() = nullptr;
    int (*num_threads)() = nullptr;
};

inline OpenMp& open_mp() {
    static OpenMp functions;
    return functions;
}

class Team;

// One thread's place in its team.
struct Thread {
    Team* team;
    int number;
    int num_threads;
    inline void wait();
};

class Team {
public:
    // Run `work(thread)` on each of `num_threads` threads, or fewer if the runtime has no more.
    template <class Work>
    static void run(int num_threads, Work work) {
        Team team;
        if (num_threads == 1 || open_mp().parallel == nullptr) {
            work(Thread{&team, 0, 1});
            return;
        }
        struct Shared {
            Team* team;
            Work* work;
        } shared{&team, &work};
        open_mp().parallel(
            [](void* data) {
                Shared* given = static_cast<Shared*>(data);
                (*given->work)(
                    Thread{given->team, open_mp().thread_number(), open_mp().num_threads()});
            },
            &shared, unsigned(num_threads), 0);
    }

    // Wait until all threads are here. What they wrote before is visible to all afterwards.
    void wait(int num_threads) {
        if (num_threads == 1) return;
        const unsigned phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
#if defined(__x86_64__)
            _mm_pause();
#endif
            // the others may wait for this core
            if (spins > kSpinsBeforeYield) sched_yield();
        }
    }

private:
    static constexpr int kSpinsBeforeYield = 1000;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
};

void Thread::wait() { team->wait(num_threads); }

}  // namespace polybasic
