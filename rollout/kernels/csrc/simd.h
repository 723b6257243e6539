// The instruction set, named once for all operators.
#pragma once

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lockstep {

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LOCKSTEP_AVX512 1
#define LOCKSTEP_AVX512_BF16 1
inline constexpr const char* kIsa = "avx512_bf16";
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LOCKSTEP_AVX512 1
inline constexpr const char* kIsa = "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
inline constexpr const char* kIsa = "avx2";
#else
inline constexpr const char* kIsa = "portable";
#endif

}  // namespace lockstep
