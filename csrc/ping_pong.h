// SPDX-License-Identifier: Apache-2.0
// Ping-pong scheduling: `count` warpgroups, from number `warpgroup` on, take turns in the code between turn_take and
// turn_pass. Each has a barrier, `first` and on, at which it waits for the one before it. The first one begins. The
// including header defines warpgroup_of_thread, turn_wait and turn_give, for a GPU or for the host.
#pragma once

namespace tile {

template <int first, int warpgroup, int count> TILE_DEVICE void turn_open() {
  static_assert(first > 0 && first + count <= 16 && count > 1, "barriers 1 to 15, one for each warpgroup");
  if (warpgroup_of_thread() == warpgroup + count - 1) turn_give(first);
}
template <int first, int warpgroup, int count> TILE_DEVICE void turn_take() {
  turn_wait(first + warpgroup_of_thread() - warpgroup);
}
template <int first, int warpgroup, int count> TILE_DEVICE void turn_pass() {
  const int next = warpgroup_of_thread() - warpgroup + 1;
  turn_give(first + (next == count ? 0 : next));
}
template <int first, int warpgroup, int count> TILE_DEVICE void turn_close() {
  if (warpgroup_of_thread() == warpgroup) turn_wait(first);
}

}  // namespace tile
