// Whose phases are told apart by the time of day, or by that of this thread.
#pragma once
#include <cstdint>
#include <ctime>

namespace calm {

struct Timer {
    double* seconds;  // by phase
    clockid_t clock;
    double last;

    Timer(double* seconds, bool cpu_time)
        : seconds(seconds), clock(cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC), last(now()) {}
    double now() const {
        timespec time;
        clock_gettime(clock, &time);
        return time.tv_sec + 1e-9 * time.tv_nsec;
    }
    // What passed since the last call was of this phase.
    void operator()(int32_t phase) {
        const double time = now();
        seconds[phase] += time - last;
        last = time;
    }
};

}  // namespace calm
