// Allocations that fail on purpose: the operator new of the test program.
#pragma once

#include <cstddef>

namespace looped::tests {

enum class Where { worker_threads, this_thread };

// While it lives, allocation number `first` (from 0) of the threads it watches throws std::bad_alloc, and the `count` - 1 after it.
class FailingAllocations {
public:
    FailingAllocations(Where where, std::size_t first, std::size_t count = 1);
    ~FailingAllocations();
    FailingAllocations(const FailingAllocations&) = delete;

    bool has_failed() const;  // whether one was reached
};

}  // namespace looped::tests
