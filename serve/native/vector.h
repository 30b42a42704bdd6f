// Vectors of 16 lanes, and the three products that every matrix here is made of.
//
// A lane is 32 bits wide and holds one fp32, two bf16 or four int8, so that all three kinds of weights share one layout
// and one loop. Written with the compiler's own vector types; the dot-product instructions are used where the machine
// has them, and otherwise spelled out with the same result up to rounding (int8: to the bit).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace calm {

constexpr int W = 16;  // lanes of a vector
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef float vfu __attribute__((vector_size(64), aligned(4)));  // the same at any address
typedef int32_t viu __attribute__((vector_size(64), aligned(4)));

static INLINE vf load(const float* p) { return *(const vfu*)p; }
static INLINE vi loadi(const void* p) { return *(const viu*)p; }
static INLINE void store(float* p, vf v) { *(vfu*)p = v; }
static INLINE vf broadcast(float x) { return x - vf{}; }
static INLINE vi broadcast(int32_t x) { return x - vi{}; }
static INLINE vf choose(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
static INLINE vi choose(vi mask, vi a, vi b) { return (a & mask) | (b & ~mask); }
static INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
static INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 *x = (__m256*)&a, *y = (__m256*)&b, *z = (__m256*)&c;
    z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]), z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
    return c;
#else
    for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

static INLINE float sum(vf v) {
    float s[W];
    store(s, v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}
static INLINE float largest(vf v) {
    float s[W];
    store(s, v);
    float m = s[0];
    for (int i = 1; i < W; i++) m = s[i] > m ? s[i] : m;
    return m;
}

// e^x, within 2 units in the last place; 0 below -87.3, that of 88.7 above it, NaN stays NaN.
static INLINE vf exponential(vf x) {
    const vf low = broadcast(-87.3f), high = broadcast(88.7f);
    vi tiny = x < low;
    x = choose(x > high, high, choose(tiny, low, x));
    const vf magic = broadcast(12582912.0f);  // adding it rounds to a whole number
    vf n = multiply_add(x, broadcast(1.44269504f), magic) - magic;
    vf r = multiply_add(n, broadcast(-0.693359375f), x);
    r = multiply_add(n, broadcast(2.12194440e-4f), r);
    vf p = broadcast(1.0f / 5040);
    const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float term : terms) p = multiply_add(p, r, broadcast(term));
    vi whole = __builtin_convertvector(choose(x == x, n, vf{}), vi);
    vf result = (vf)((vi)p + (whole << 23));
    return choose(tiny, vf{}, choose(x == x, result, x));
}

// bf16, rounded to nearest even.
typedef uint16_t bf16;
static INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return (bits >> 16) | 64;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static INLINE float of_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// As many numbers, one after another; the last ones one by one.
static INLINE void to_bf16(const float* x, int count, bf16* out) {
    int k = 0;
#if defined(__AVX512BF16__)
    for (; k + W <= count; k += W) {
        __m256bh half = _mm512_cvtneps_pbh((__m512)load(x + k));
        std::memcpy(out + k, &half, 32);
    }
#endif
    for (; k < count; k++) out[k] = to_bf16(x[k]);
}

// What a lane holds. ``dot`` adds the products of two lanes' numbers to a lane of the sum.
struct Fp32 {
    static constexpr int PER = 1;
    typedef float Number;
    typedef vf Sum;
    static INLINE Number round(float x) { return x; }
    static INLINE Sum dot(vi a, vi b, Sum c) { return multiply_add((vf)a, (vf)b, c); }
};
struct Bf16 {
    static constexpr int PER = 2;
    typedef bf16 Number;
    typedef vf Sum;
    static INLINE Number round(float x) { return to_bf16(x); }
    static INLINE Sum dot(vi a, vi b, Sum c) {
#if defined(__AVX512BF16__)
        return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
        const vi top = broadcast((int32_t)0xffff0000);
        c = multiply_add((vf)(a << 16), (vf)(b << 16), c);
        return multiply_add((vf)(a & top), (vf)(b & top), c);
#endif
    }
};
struct Int8 {  // the left factor is unsigned: a signed number plus 128
    static constexpr int PER = 4;
    typedef uint8_t Number;
    typedef vi Sum;
    static INLINE Sum dot(vi a, vi b, Sum c) {
#if defined(__AVX512VNNI__)
        return (vi)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#else
        const vi byte = broadcast(0xff);
        c += (a & byte) * ((b << 24) >> 24);
        c += ((a >> 8) & byte) * ((b << 16) >> 24);
        c += ((a >> 16) & byte) * ((b << 8) >> 24);
        return c + ((a >> 24) & byte) * (b >> 24);
#endif
    }
};

static INLINE int groups(int count, int per) { return (count + per - 1) / per; }
static INLINE int whole(int count) { return groups(count, W) * W; }

}  // namespace calm
