// How many threads passes get. A thread whose core is taken by other work delays all others at the next
// barrier; where that costs more than a thread adds, passes are faster with one thread fewer. The results
// are the same with any number.
#pragma once

#include <algorithm>
#include <chrono>
#include <unordered_map>

namespace polybasic {

class Crew {
public:
    using Clock = std::chrono::steady_clock;

    // The crew of the thread that calls, for passes of at most so many threads: passes of different callers run
    // at the same time, and short ones that need fewer threads say little of long ones.
    static Crew& of_caller(int most) {
        static thread_local std::unordered_map<int, Crew> crews;
        return crews.try_emplace(most, most).first->second;
    }

    explicit Crew(int most) : most_(most), size_(most) {}

    // Threads of the next pass.
    int size() {
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
            const bool in_vain = now - taken_ - retry_ < pause_;  // and it may have taken long
            const Clock::duration longest = std::max(kLongestPause, kPauseOfTrial * taken_);
            pause_ = in_vain ? std::min(2 * pause_, longest) : kPause;
            retry_ = now + pause_;
            --size_;
        }
        taken_ = lost_ = {};
    }

private:
    static constexpr Clock::duration kWindow = std::chrono::milliseconds(10);
    static constexpr Clock::duration kPause = std::chrono::milliseconds(50);
    static constexpr Clock::duration kLongestPause = std::chrono::milliseconds(400);
    static constexpr int kPauseOfTrial = 16;  // or of as many trials: these are slow passes

    int most_, size_;
    Clock::duration taken_{}, lost_{};  // since the size was last judged
    Clock::duration pause_ = kPause;    // before one thread more is tried again
    Clock::time_point retry_{};         // when that is, or was
};

}  // namespace polybasic
