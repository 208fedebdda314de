/* The kernels for AVX2; the rest of the library stays runnable on processors without it. */
#if defined(__x86_64__)

#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,bmi,bmi2,popcnt")
#endif

#include "vec_avx2.h"

#define TW_TABLE tw_avx2
#include "template.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
typedef int tw_nothing_to_build_here;
#endif
