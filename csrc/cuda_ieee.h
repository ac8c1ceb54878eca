// SPDX-License-Identifier: Apache-2.0
// Arithmetic rounded in a direction, which nothing is fused with: one instruction each.
#pragma once
#include "cuda_types.h"

namespace tile {

TILE_DEVICE float ieee_add_rn(float a, float b) { return __fadd_rn(a, b); }
TILE_DEVICE float ieee_add_rz(float a, float b) { return __fadd_rz(a, b); }
TILE_DEVICE float ieee_add_ru(float a, float b) { return __fadd_ru(a, b); }
TILE_DEVICE float ieee_add_rd(float a, float b) { return __fadd_rd(a, b); }
TILE_DEVICE double ieee_add_rn(double a, double b) { return __dadd_rn(a, b); }
TILE_DEVICE double ieee_add_rz(double a, double b) { return __dadd_rz(a, b); }
TILE_DEVICE double ieee_add_ru(double a, double b) { return __dadd_ru(a, b); }
TILE_DEVICE double ieee_add_rd(double a, double b) { return __dadd_rd(a, b); }
TILE_DEVICE float ieee_sub_rn(float a, float b) { return __fsub_rn(a, b); }
TILE_DEVICE float ieee_sub_rz(float a, float b) { return __fsub_rz(a, b); }
TILE_DEVICE float ieee_sub_ru(float a, float b) { return __fsub_ru(a, b); }
TILE_DEVICE float ieee_sub_rd(float a, float b) { return __fsub_rd(a, b); }
TILE_DEVICE double ieee_sub_rn(double a, double b) { return __dsub_rn(a, b); }
TILE_DEVICE double ieee_sub_rz(double a, double b) { return __dsub_rz(a, b); }
TILE_DEVICE double ieee_sub_ru(double a, double b) { return __dsub_ru(a, b); }
TILE_DEVICE double ieee_sub_rd(double a, double b) { return __dsub_rd(a, b); }
TILE_DEVICE float ieee_mul_rn(float a, float b) { return __fmul_rn(a, b); }
TILE_DEVICE float ieee_mul_rz(float a, float b) { return __fmul_rz(a, b); }
TILE_DEVICE float ieee_mul_ru(float a, float b) { return __fmul_ru(a, b); }
TILE_DEVICE float ieee_mul_rd(float a, float b) { return __fmul_rd(a, b); }
TILE_DEVICE double ieee_mul_rn(double a, double b) { return __dmul_rn(a, b); }
TILE_DEVICE double ieee_mul_rz(double a, double b) { return __dmul_rz(a, b); }
TILE_DEVICE double ieee_mul_ru(double a, double b) { return __dmul_ru(a, b); }
TILE_DEVICE double ieee_mul_rd(double a, double b) { return __dmul_rd(a, b); }
TILE_DEVICE float ieee_fmaf_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TILE_DEVICE float ieee_fmaf_rz(float a, float b, float c) { return __fmaf_rz(a, b, c); }
TILE_DEVICE float ieee_fmaf_ru(float a, float b, float c) { return __fmaf_ru(a, b, c); }
TILE_DEVICE float ieee_fmaf_rd(float a, float b, float c) { return __fmaf_rd(a, b, c); }
TILE_DEVICE double ieee_fmaf_rn(double a, double b, double c) { return __fma_rn(a, b, c); }
TILE_DEVICE double ieee_fmaf_rz(double a, double b, double c) { return __fma_rz(a, b, c); }
TILE_DEVICE double ieee_fmaf_ru(double a, double b, double c) { return __fma_ru(a, b, c); }
TILE_DEVICE double ieee_fmaf_rd(double a, double b, double c) { return __fma_rd(a, b, c); }
TILE_DEVICE float ieee_frcp_rn(float a) { return __frcp_rn(a); }
TILE_DEVICE float ieee_frcp_rz(float a) { return __frcp_rz(a); }
TILE_DEVICE float ieee_frcp_ru(float a) { return __frcp_ru(a); }
TILE_DEVICE float ieee_frcp_rd(float a) { return __frcp_rd(a); }
TILE_DEVICE double ieee_frcp_rn(double a) { return __drcp_rn(a); }
TILE_DEVICE double ieee_frcp_rz(double a) { return __drcp_rz(a); }
TILE_DEVICE double ieee_frcp_ru(double a) { return __drcp_ru(a); }
TILE_DEVICE double ieee_frcp_rd(double a) { return __drcp_rd(a); }
TILE_DEVICE float ieee_fsqrt_rn(float a) { return __fsqrt_rn(a); }
TILE_DEVICE float ieee_fsqrt_rz(float a) { return __fsqrt_rz(a); }
TILE_DEVICE float ieee_fsqrt_ru(float a) { return __fsqrt_ru(a); }
TILE_DEVICE float ieee_fsqrt_rd(float a) { return __fsqrt_rd(a); }
TILE_DEVICE double ieee_fsqrt_rn(double a) { return __dsqrt_rn(a); }
TILE_DEVICE double ieee_fsqrt_rz(double a) { return __dsqrt_rz(a); }
TILE_DEVICE double ieee_fsqrt_ru(double a) { return __dsqrt_ru(a); }
TILE_DEVICE double ieee_fsqrt_rd(double a) { return __dsqrt_rd(a); }
TILE_DEVICE float ieee_fdiv_rn(float a, float b) { return __fdiv_rn(a, b); }
TILE_DEVICE float ieee_fdiv_rz(float a, float b) { return __fdiv_rz(a, b); }
TILE_DEVICE float ieee_fdiv_ru(float a, float b) { return __fdiv_ru(a, b); }
TILE_DEVICE float ieee_fdiv_rd(float a, float b) { return __fdiv_rd(a, b); }
TILE_DEVICE double ieee_fdiv_rn(double a, double b) { return __ddiv_rn(a, b); }
TILE_DEVICE double ieee_fdiv_rz(double a, double b) { return __ddiv_rz(a, b); }
TILE_DEVICE double ieee_fdiv_ru(double a, double b) { return __ddiv_ru(a, b); }
TILE_DEVICE double ieee_fdiv_rd(double a, double b) { return __ddiv_rd(a, b); }
TILE_DEVICE float ieee_frsqrt_rn(float a) { return __frsqrt_rn(a); }
TILE_DEVICE double ieee_frsqrt_rn(double a) { return __drcp_rn(__dsqrt_rn(a)); }

}  // namespace tile
