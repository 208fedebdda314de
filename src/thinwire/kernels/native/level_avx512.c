/* The kernels for AVX-512; the rest of the library stays runnable on processors without it. */
#if defined(__x86_64__)

#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2,popcnt")
#endif

#include "vec_avx512.h"

#define TW_TABLE tw_avx512
#include "template.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
typedef int tw_nothing_to_build_here;
#endif
