// Where the threads of a pass wait for each other, a hundred times in a millisecond. While each has
// a core of its own, the fastest way is to spin. Cores that are shared with other work need more:
// a thread that spins takes the time of another one that it waits for, or its own time of the next
// milliseconds, which the scheduler gives out in equal parts.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>

#include <sched.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace polybasic {

class Barrier {
public:
    // Wait until all threads are here; this one is `number`. What they wrote before is visible to
    // all afterwards.
    void wait(int number, int num_threads) {
        if (num_threads == 1) return;
        const unsigned phase = phase_.load(std::memory_order_acquire);
        note_place(number);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1);
            if (num_asleep_.load() > 0) wake_all();
            return;
        }
        if (spin(phase, kPauses)) return;
        const Clock::time_point begin = Clock::now();
        wait_longer(phase, number, num_threads, begin);
        lost_.fetch_add((Clock::now() - begin).count(), std::memory_order_relaxed);
    }

    // What the threads waited for late ones, in total.
    std::chrono::steady_clock::duration lost() const { return Clock::duration(lost_.load()); }

private:
    using Clock = std::chrono::steady_clock;
    static constexpr int kPauses = 256;     // of 40 to 140 cycles each
    static constexpr int kPausesBetweenLooks = 32;
    static constexpr std::chrono::microseconds kStep{20};       // between looks at the others' places
    static constexpr std::chrono::microseconds kShort{300};     // from then on, another is not running
    static constexpr std::chrono::microseconds kLong{5000};     // more than others run at a time
    static constexpr int kMostPlaces = 256;

    // Whether the phase ended.
    bool spin(unsigned phase, int pauses) const {
        for (int i = 0; i < pauses; ++i) {
            if (phase_.load(std::memory_order_acquire) != phase) return true;
#if defined(__x86_64__)
            _mm_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
        }
        return false;
    }

#if defined(__linux__)
    // The others are late. One that shares this core can not come before this thread makes room: it
    // moves to another core, or sleeps. One that runs nowhere comes back when the scheduler lets it:
    // if this core has other work as well, that work is let run meanwhile, so that both threads
    // run again at the same time; else the core is kept, since whoever gets it keeps it for long.
    void wait_longer(unsigned phase, int number, int num_threads, Clock::time_point begin) {
        bool has_looked = false;
        for (auto until = begin + kStep;; until += kStep) {
            do {
                if (spin(phase, kPausesBetweenLooks)) return;
            } while (Clock::now() < until);
            if (is_core_of_another(number, num_threads) && !move_away(number, num_threads)) break;
            const auto waited = Clock::now() - begin;
            if (waited > kLong) break;
            if (waited > kShort && !has_looked) {
                has_looked = true;
                if (was_preempted()) break;
            }
        }
        num_asleep_.fetch_add(1);
        while (phase_.load() == phase)
            syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
        num_asleep_.fetch_sub(1);
    }

    void wake_all() {
        syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    static void note_place(int number) {
        if (number < kMostPlaces)
            place_of(number).store(sched_getcpu() + 1, std::memory_order_relaxed);
    }

    static bool is_core_of_another(int number, int num_threads) {
        const int here = sched_getcpu() + 1;
        for (int other = 0; other < num_threads && other < kMostPlaces; ++other)
            if (other != number && place_of(other).load(std::memory_order_relaxed) == here)
                return true;
        return false;
    }

    // To a core that no other thread of the team was seen on. The cores that it may use afterwards
    // are those that it could use before. False if there is none.
    static bool move_away(int number, int num_threads) {
        cpu_set_t allowed;
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
        cpu_set_t free = allowed;
        for (int other = 0; other < num_threads && other < kMostPlaces; ++other) {
            const int place = place_of(other).load(std::memory_order_relaxed) - 1;
            if (place >= 0 && place < CPU_SETSIZE) CPU_CLR(place, &free);
        }
        if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free) != 0) return false;
        sched_setaffinity(0, sizeof allowed, &allowed);
        note_place(number);
        return true;
    }

    // Whether other work took this thread's core since the last time that it asked.
    static bool was_preempted() {
        static thread_local long last = 0;
        rusage usage;
        if (getrusage(RUSAGE_THREAD, &usage) != 0) return false;
        static thread_local bool before = false;
        const bool was = usage.ru_nivcsw != last, twice = was && before;
        last = usage.ru_nivcsw;
        before = was;
        return twice;
    }

    // The core that a thread was seen on last, plus one; of all teams, since they are the same threads.
    static std::atomic<int>& place_of(int number) {
        static std::atomic<int> places[kMostPlaces] = {};
        return places[number];
    }
#else
    void wait_longer(unsigned phase, int, int, Clock::time_point) {
        while (!spin(phase, kPausesBetweenLooks)) sched_yield();
    }
    void wake_all() {}
    static void note_place(int) {}
#endif

    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
    std::atomic<int> num_asleep_{0};
    std::atomic<Clock::rep> lost_{0};
};

}  // namespace polybasic
