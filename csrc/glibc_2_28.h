/* Binds functions to the versions that glibc had before 2.28, so that a library that is compiled with a newer one loads
   there too. `make wheel` puts this header before every file; auditwheel checks the result. x86-64 only. */
#if defined(__linux__) && defined(__x86_64__)
#define _POSIX_C_SOURCE 200809L /* as some files that this header comes before */
#include <sys/stat.h>

__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver pthread_attr_setstacksize, pthread_attr_setstacksize@GLIBC_2.2.5");
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_getspecific, pthread_getspecific@GLIBC_2.2.5");
__asm__(".symver pthread_key_create, pthread_key_create@GLIBC_2.2.5");
__asm__(".symver pthread_once, pthread_once@GLIBC_2.2.5");
__asm__(".symver pthread_setspecific, pthread_setspecific@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.2.5");

/* fstat is a function of the library since 2.33; before, it was inline and called this one. */
int __fxstat(int version, int file, struct stat *status);
__asm__(".symver __fxstat, __fxstat@GLIBC_2.2.5");
#define fstat(file, status) __fxstat(1, file, status)
#endif
