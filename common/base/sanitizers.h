/* sanitizers.h - whether this is a build with AddressSanitizer or ThreadSanitizer. gcc defines
 * macros, clang answers __has_feature. */
#ifndef TD_BASE_SANITIZERS_H
#define TD_BASE_SANITIZERS_H

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TD_WITH_ASAN
#endif
#if __has_feature(thread_sanitizer)
#define TD_WITH_TSAN
#endif
#endif

#if defined(__SANITIZE_ADDRESS__) && !defined(TD_WITH_ASAN)
#define TD_WITH_ASAN
#endif
#if defined(__SANITIZE_THREAD__) && !defined(TD_WITH_TSAN)
#define TD_WITH_TSAN
#endif

#endif
