// The threads that run one pass together: torch's own, so that no second pool competes for the
// cores, in one parallel region from the first layer to the last.
#pragma once

#include "threads/barrier.h"
#include "threads/crew.h"

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
    // Run `work(thread)` on each of `num_threads` threads, or fewer if the runtime has no more or they
    // have to share their cores.
    template <class Work>
    static void run(int num_threads, Work work) {
        Team team;
        Crew& crew = Crew::of_caller(num_threads);
        num_threads = crew.size();
        if (num_threads == 1 || open_mp().parallel == nullptr) {
            work(Thread{&team, 0, 1});
            return;
        }
        struct Shared {
            Team* team;
            Work* work;
        } shared{&team, &work};
        const Crew::Clock::time_point begin = Crew::Clock::now();
        open_mp().parallel(
            [](void* data) {
                Shared* given = static_cast<Shared*>(data);
                (*given->work)(
                    Thread{given->team, open_mp().thread_number(), open_mp().num_threads()});
            },
            &shared, unsigned(num_threads), 0);
        crew.note(Crew::Clock::now() - begin, team.barrier.lost());
    }

    Barrier barrier;
};

void Thread::wait() { team->barrier.wait(number, num_threads); }

}  // namespace polybasic
