// Anderson acceleration of one prompt's loop (Walker and Ni, 2011).
#pragma once

#include "loop/memory.hpp"

namespace looped::loop {

// Takes a loop's Y and F into the history and writes the mixed state. Returns whether g rose, so that the history was dropped.
template <class T>
bool anderson_step(AndersonMemory<T> memory, Rows<const T> state, Rows<const T> image, double g, Rows<T> mixed);

}  // namespace looped::loop
