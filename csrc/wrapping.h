// SPDX-License-Identifier: Apache-2.0
// Arithmetic of signed integers that wraps. C++ leaves a value outside of the type undefined, of which compilers make use:
// NVRTC takes a sum of two natural numbers for natural. The including header defines TILE_DEVICE, for a GPU or for the host.
#pragma once

namespace tile {

template <class T> struct Unsigned { using type = unsigned; };
template <> struct Unsigned<int64_t> { using type = uint64_t; };

#define TILE_WRAPPING(name, op)                                \
  template <class T> TILE_DEVICE T wrapping_##name(T a, T b) { \
    using U = typename Unsigned<T>::type;                      \
    return T(U(a) op U(b));                                    \
  }
TILE_WRAPPING(add, +)
TILE_WRAPPING(sub, -)
TILE_WRAPPING(mul, *)
#undef TILE_WRAPPING
template <class T> TILE_DEVICE T wrapping_shl(T a, T b) { return T(typename Unsigned<T>::type(a) << b); }

}  // namespace tile
