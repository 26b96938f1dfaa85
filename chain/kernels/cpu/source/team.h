// The threads that run one pass together: torch's own, so that no second pool competes for the
// cores, in one parallel region from the first layer to the last.
#pragma once

#include "barrier.h"

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

    Barrier barrier;
};

void Thread::wait() { team->barrier.wait(number, num_threads); }

}  // namespace polybasic
