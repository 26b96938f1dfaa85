// Functions through which tests/chain/kernels/cpu/test_crew.py calls a crew.

#include "threads/crew.h"

using polybasic::Crew;

extern "C" {

void crew_begin(int most) { Crew::of_caller(most) = Crew(most); }

int crew_size(int most) { return Crew::of_caller(most).size(); }

void crew_note(int most, double taken_ms, double lost_ms) {
    using Milliseconds = std::chrono::duration<double, std::milli>;
    const auto whole = [](double ms) {
        return std::chrono::duration_cast<Crew::Clock::duration>(Milliseconds(ms));
    };
    Crew::of_caller(most).note(whole(taken_ms), whole(lost_ms));
}
}
