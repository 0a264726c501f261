/* copy.c - memcpy, and AVX2 with streaming stores; see the header for what each is worth. */
#include "common/transfer/copy.h"

#include <pthread.h>
#include <string.h>

static void copy_ref(uint8_t *to, const uint8_t *from, size_t n) { memcpy(to, from, n); }

#if defined(__x86_64__)
#include <immintrin.h>

#define LINE 64
#define AHEAD 1024 /* bytes */

__attribute__((target("avx2"))) static void copy_avx2(uint8_t *to, const uint8_t *from, size_t n)
{
    if (n < TD_XFER_COPY_STREAM_MIN) {
        memcpy(to, from, n);
        return;
    }
    size_t i =
        (size_t)(-(uintptr_t)to & (LINE - 1)); /* half a line would be read to be completed */
    memcpy(to, from, i);
    for (; i + 2 * LINE <= n; i += 2 * LINE) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + i)),
                b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + i + 64)),
                d = _mm256_loadu_si256((const __m256i *)(from + i + 96));
        /* past the end it does nothing */
        _mm_prefetch((const char *)((uintptr_t)from + i + AHEAD), _MM_HINT_NTA);
        _mm_prefetch((const char *)((uintptr_t)from + i + AHEAD + LINE), _MM_HINT_NTA);
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + 32), b);
        _mm256_stream_si256((__m256i *)(to + i + 64), c);
        _mm256_stream_si256((__m256i *)(to + i + 96), d);
    }
    _mm_sfence(); /* an unlock, after which the slot may be READY, does not order them */
    memcpy(to + i, from + i, n - i);
}
#endif

static td_xfer_copy_fn g_versions[2] = {copy_ref}, g_best;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

static void choose(void)
{
    g_best = copy_ref;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) g_best = g_versions[1] = copy_avx2;
#endif
}

void td_xfer_copy(uint8_t *to, const uint8_t *from, size_t n)
{
    pthread_once(&g_once, choose);
    g_best(to, from, n);
}

td_xfer_copy_fn td_xfer_copy_version(size_t i)
{
    pthread_once(&g_once, choose);
    return i < sizeof g_versions / sizeof g_versions[0] ? g_versions[i] : NULL;
}
