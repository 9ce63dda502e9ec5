// The float mode of a thread.
#pragma once

#include <cfenv>

namespace looped::block {

// Keeps the float mode of the thread that makes it, and gives it back at the end.
class FloatMode {
public:
    FloatMode() { std::fegetenv(&mode_); }
    ~FloatMode() { std::fesetenv(&mode_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

private:
    std::fenv_t mode_;
};

}  // namespace looped::block
