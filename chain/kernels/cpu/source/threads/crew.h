// How many threads passes get. A thread whose core is taken by other work delays all others at the next
// barrier; where that costs more than a thread adds, passes are faster with one thread fewer. The results
// are the same with any number.
#pragma once

#include <algorithm>
#include <chrono>

namespace polybasic {

class Crew {
public:
    using Clock = std::chrono::steady_clock;

    // The crew of the thread that calls: passes of different callers run at the same time.
    static Crew& of_caller() {
        static thread_local Crew crew;
        return crew;
    }

    // Threads of the next pass, of `most` that it may have.
    int size(int most) {
        if (most != most_) *this = Crew(most);
        if (size_ < most_ && Clock::now() >= retry_) {
            ++size_;
            taken_ = lost_ = {};
        }
        return size_;
    }

    // After a pass. `lost`: what threads waited for those that did not come, in total.
    void note(Clock::duration taken, Clock::duration lost) {
        if (size_ == 1) return;
        taken_ += taken;
        lost_ += lost;
        if (taken_ < kWindow) return;
        // without delays the others would take size / (size - 1) as long as all do
        if (lost_ / (size_ - 1) > taken_ / size_) {
            const Clock::time_point now = Clock::now();
            pause_ = now - retry_ < pause_ ? std::min(2 * pause_, kLongestPause) : kPause;
            retry_ = now + pause_;
            --size_;
        }
        taken_ = lost_ = {};
    }

private:
    static constexpr Clock::duration kWindow = std::chrono::milliseconds(10);
    static constexpr Clock::duration kPause = std::chrono::milliseconds(50);
    static constexpr Clock::duration kLongestPause = std::chrono::milliseconds(400);

    explicit Crew(int most = 0) : most_(most), size_(most) {}

    int most_, size_;
    Clock::duration taken_{}, lost_{};  // since the size was last judged
    Clock::duration pause_ = kPause;    // before one thread more is tried again
    Clock::time_point retry_{};         // when that is, or was
};

}  // namespace polybasic
