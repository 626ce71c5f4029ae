/* A layer between a program and the C library, loaded with LD_PRELOAD: strikes or records calls on files below a folder.

   `fault_arm` chooses the calls and what happens to them; `fault_record` writes every change of the disk to a file, for
   the replay of a power loss; `fault_clock` moves the wall clock. Nothing happens before one of them is called. */

#define _GNU_SOURCE 1
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum call { OPEN, CREATE, READ, WRITE, FSYNC, RENAME, UNLINK, MKDIR, FLOCK, STAT, LISTDIR, TRUNCATE, UTIME, CLOSE, STATVFS, SOCKET, NUM_CALLS };
enum action { NOTHING, FAIL, KILL, SIGNAL, TEAR_AND_KILL, TEAR_AND_FAIL, SHORT };

static char root[PATH_MAX], part[PATH_MAX];
static unsigned struck_calls;
static long first, last;
static enum action action;
static int code, record_fd = -1;
static atomic_long num_seen, num_struck, by_call[NUM_CALLS];
static _Atomic int is_active;
static pthread_mutex_t recording = PTHREAD_MUTEX_INITIALIZER;

/* The clock: `jump_s` is added from reading number `jump_at` on. */
static double jump_s;
static long jump_at;
static atomic_long num_readings;

void fault_reset(void) {
    is_active = 0, action = NOTHING, record_fd = -1, num_seen = 0, num_struck = 0, jump_s = 0;
    for (int i = 0; i < NUM_CALLS; i++) by_call[i] = 0;
}

/* Let `action` happen to calls number from..to (from 1) of the kinds in the set `calls`, on paths below `folder` that contain `text`. */
void fault_arm(const char *folder, const char *text, unsigned calls, long from, long to, int what, int with) {
    snprintf(root, sizeof root, "%s", folder);
    snprintf(part, sizeof part, "%s", text);
    struck_calls = calls, first = from, last = to, action = what, code = with, num_seen = 0, num_struck = 0, is_active = 1;
}

void fault_record(const char *folder, const char *file) {
    snprintf(root, sizeof root, "%s", folder);
    part[0] = 0;
    record_fd = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    is_active = 1;
}

void fault_clock(double seconds, long at) { jump_s = seconds, jump_at = at, num_readings = 0; }
long fault_struck(void) { return num_struck; }
long fault_seen(void) { return num_seen; }
long fault_count(int call) { return by_call[call]; }

static void fd_path(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
    out[n > 0 ? n : 0] = 0;
}

static void full_path(int dir, const char *path, char *out) {
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    char base[PATH_MAX];
    if (dir == AT_FDCWD)
        base[0] = 0, syscall(SYS_getcwd, base, sizeof base);
    else
        fd_path(dir, base);
    snprintf(out, PATH_MAX, "%s%s%s", base, path[0] ? "/" : "", path);
}

static int is_inside(const char *path) {
    size_t n = strlen(root);
    return strncmp(path, root, n) == 0 && (path[n] == '/' || path[n] == 0 || path[n] == '[');  /* socket:[123] */
}

/* What is to happen to this call; kills and signals have happened when this returns. */
static enum action strike(enum call call, const char *path) {
    if (call != SOCKET && (!is_inside(path) || !strstr(path + strlen(root), part))) return NOTHING;
    by_call[call]++;
    if (action == NOTHING || !(struck_calls >> call & 1)) return NOTHING;
    long n = ++num_seen;
    if (n < first || n > last) return NOTHING;
    num_struck++;
    if (action == KILL) {
        syscall(SYS_kill, getpid(), SIGKILL);
        for (;;) pause();
    }
    if (action == SIGNAL) {
        syscall(SYS_kill, getpid(), code);
        return NOTHING;
    }
    if (call != WRITE && action != FAIL) return NOTHING;
    errno = code;
    return action;
}

static void record(const char *kind, const char *path, const char *other, long offset, long size, const void *data) {
    if (record_fd < 0) return;
    char head[2 * PATH_MAX + 128];
    int n = snprintf(head, sizeof head, "%s\t%s\t%s\t%ld\t%ld\n", kind, path, other, offset, size);
    pthread_mutex_lock(&recording);
    syscall(SYS_write, record_fd, head, n);
    if (data && size > 0) syscall(SYS_write, record_fd, data, size);
    pthread_mutex_unlock(&recording);
}

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int open_as(const char *name, int dir, const char *path, int flags, mode_t mode) {
    int (*real)(int, const char *, int, mode_t) = (void *)dlsym(RTLD_NEXT, name);
    if (!is_active) return real(dir, path, flags, mode);
    char full[PATH_MAX];
    full_path(dir, path, full);
    if (!is_inside(full)) return real(dir, path, flags, mode);
    int is_write = (flags & O_ACCMODE) != O_RDONLY;
    if (strike(is_write ? CREATE : OPEN, full)) return -1;
    int was_there = syscall(SYS_faccessat, AT_FDCWD, full, F_OK) == 0;
    int fd = real(dir, path, flags, mode);
    if (fd >= 0 && (flags & O_CREAT) && !was_there) record("create", full, "", 0, 0, NULL);
    if (fd >= 0 && (flags & O_TRUNC) && was_there) record("truncate", full, "", 0, 0, NULL);
    return fd;
}

#define MODE(flags) \
    va_list list; \
    va_start(list, flags); \
    mode_t mode = (flags) & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
    va_end(list)

int open(const char *path, int flags, ...) { MODE(flags); return open_as("openat", AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags); return open_as("openat64", AT_FDCWD, path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE(flags); return open_as("openat", dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE(flags); return open_as("openat64", dir, path, flags, mode); }

#define FOPEN(name) \
    FILE *name(const char *path, const char *how) { \
        REAL(FILE *, #name, const char *, const char *); \
        char full[PATH_MAX]; \
        if (is_active && (full_path(AT_FDCWD, path, full), strike(strchr(how, 'r') ? OPEN : CREATE, full))) return NULL; \
        return real(path, how); \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* A call on a descriptor that either fails or happens. */
#define ON_FD(call, kind, name, result, declared, passed, ...) \
    result name declared { \
        REAL(result, #name, __VA_ARGS__); \
        if (!is_active) return real passed; \
        char path[PATH_MAX]; \
        fd_path(fd, path); \
        if (strike(call, path)) return -1; \
        result found = real passed; \
        if (kind && found >= 0 && is_inside(path)) record(kind, path, "", 0, 0, NULL); \
        return found; \
    }

ON_FD(READ, NULL, read, ssize_t, (int fd, void *to, size_t n), (fd, to, n), int, void *, size_t)
ON_FD(READ, NULL, pread, ssize_t, (int fd, void *to, size_t n, off_t at), (fd, to, n, at), int, void *, size_t, off_t)
ON_FD(READ, NULL, pread64, ssize_t, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at), int, void *, size_t, off64_t)
ON_FD(READ, NULL, readv, ssize_t, (int fd, const struct iovec *to, int n), (fd, to, n), int, const struct iovec *, int)
ON_FD(READ, NULL, recv, ssize_t, (int fd, void *to, size_t n, int how), (fd, to, n, how), int, void *, size_t, int)
ON_FD(WRITE, NULL, writev, ssize_t, (int fd, const struct iovec *from, int n), (fd, from, n), int, const struct iovec *, int)
ON_FD(WRITE, NULL, send, ssize_t, (int fd, const void *from, size_t n, int how), (fd, from, n, how), int, const void *, size_t, int)
ON_FD(WRITE, NULL, sendmsg, ssize_t, (int fd, const struct msghdr *from, int how), (fd, from, how), int, const struct msghdr *, int)
ON_FD(FSYNC, "fsync", fsync, int, (int fd), (fd), int)
ON_FD(FSYNC, "fsync", fdatasync, int, (int fd), (fd), int)
ON_FD(FLOCK, NULL, flock, int, (int fd, int how), (fd, how), int, int)
ON_FD(STAT, NULL, fstat, int, (int fd, struct stat *to), (fd, to), int, struct stat *)
ON_FD(STAT, NULL, fstat64, int, (int fd, struct stat64 *to), (fd, to), int, struct stat64 *)
ON_FD(UTIME, NULL, futimens, int, (int fd, const struct timespec *to), (fd, to), int, const struct timespec *)
ON_FD(STATVFS, NULL, fstatvfs64, int, (int fd, struct statvfs64 *to), (fd, to), int, struct statvfs64 *)

/* A close that reports a failed write, as NFS does; the descriptor is closed all the same. */
int close(int fd) {
    REAL(int, "close", int);
    if (!is_active || fd == record_fd) return real(fd);
    char path[PATH_MAX];
    fd_path(fd, path);
    enum action what = strike(CLOSE, path);
    int found = real(fd);
    if (what) errno = code;
    return what ? -1 : found;
}

#define TRUNCATE_FD(name, offset) \
    int name(int fd, offset size) { \
        REAL(int, #name, int, offset); \
        if (!is_active) return real(fd, size); \
        char path[PATH_MAX]; \
        fd_path(fd, path); \
        if (strike(TRUNCATE, path)) return -1; \
        int found = real(fd, size); \
        if (found == 0 && is_inside(path)) record("truncate", path, "", 0, size, NULL); \
        return found; \
    }
TRUNCATE_FD(ftruncate, off_t)
TRUNCATE_FD(ftruncate64, off64_t)

/* Where the next write begins: at the end of a file that is appended to. */
static long position(int fd) {
    struct stat status;
    if (syscall(SYS_fcntl, fd, F_GETFL) & O_APPEND) return syscall(SYS_fstat, fd, &status) == 0 ? status.st_size : 0;
    return syscall(SYS_lseek, fd, 0L, SEEK_CUR);
}

ssize_t write(int fd, const void *from, size_t n) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (!is_active) return real(fd, from, n);
    char path[PATH_MAX];
    fd_path(fd, path);
    if (!is_inside(path)) return real(fd, from, n);
    enum action what = strike(WRITE, path);
    if (what == FAIL) return -1;
    if (what) n = n / 2;
    long at = position(fd);
    ssize_t found = real(fd, from, n);
    if (found > 0) record("write", path, "", at, found, from);
    if (what == TEAR_AND_KILL) {
        syscall(SYS_kill, getpid(), SIGKILL);
        for (;;) pause();
    }
    if (what == TEAR_AND_FAIL) {
        errno = code;
        return -1;
    }
    return found;
}

/* A call on a path that either fails or happens. */
#define ON_PATH(call, kind, name, dir, declared, passed, ...) \
    int name declared { \
        REAL(int, #name, __VA_ARGS__); \
        if (!is_active) return real passed; \
        char full[PATH_MAX]; \
        full_path(dir, path, full); \
        if (strike(call, full)) return -1; \
        int found = real passed; \
        if (kind && found == 0 && is_inside(full)) record(kind, full, "", 0, 0, NULL); \
        return found; \
    }

ON_PATH(UNLINK, "unlink", unlink, AT_FDCWD, (const char *path), (path), const char *)
ON_PATH(UNLINK, "rmdir", rmdir, AT_FDCWD, (const char *path), (path), const char *)
ON_PATH(UNLINK, (flags & AT_REMOVEDIR ? "rmdir" : "unlink"), unlinkat, dir, (int dir, const char *path, int flags), (dir, path, flags), int, const char *, int)
ON_PATH(MKDIR, "mkdir", mkdir, AT_FDCWD, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
ON_PATH(MKDIR, "mkdir", mkdirat, dir, (int dir, const char *path, mode_t mode), (dir, path, mode), int, const char *, mode_t)
ON_PATH(STAT, NULL, stat, AT_FDCWD, (const char *path, struct stat *to), (path, to), const char *, struct stat *)
ON_PATH(STAT, NULL, stat64, AT_FDCWD, (const char *path, struct stat64 *to), (path, to), const char *, struct stat64 *)
ON_PATH(STAT, NULL, lstat, AT_FDCWD, (const char *path, struct stat *to), (path, to), const char *, struct stat *)
ON_PATH(STAT, NULL, lstat64, AT_FDCWD, (const char *path, struct stat64 *to), (path, to), const char *, struct stat64 *)
ON_PATH(STAT, NULL, fstatat, dir, (int dir, const char *path, struct stat *to, int flags), (dir, path, to, flags), int, const char *, struct stat *, int)
ON_PATH(STAT, NULL, fstatat64, dir, (int dir, const char *path, struct stat64 *to, int flags), (dir, path, to, flags), int, const char *, struct stat64 *, int)
ON_PATH(STAT, NULL, statx, dir, (int dir, const char *path, int flags, unsigned mask, struct statx *to), (dir, path, flags, mask, to), int, const char *, int, unsigned, struct statx *)
ON_PATH(UTIME, NULL, utimensat, dir, (int dir, const char *path, const struct timespec *to, int flags), (dir, path, to, flags), int, const char *, const struct timespec *, int)
ON_PATH(STATVFS, NULL, statvfs, AT_FDCWD, (const char *path, struct statvfs *to), (path, to), const char *, struct statvfs *)
ON_PATH(STATVFS, NULL, statvfs64, AT_FDCWD, (const char *path, struct statvfs64 *to), (path, to), const char *, struct statvfs64 *)

#define RENAME_PATHS(name, from_dir, to_dir, declared, passed, ...) \
    int name declared { \
        REAL(int, #name, __VA_ARGS__); \
        if (!is_active) return real passed; \
        char full[PATH_MAX], target[PATH_MAX]; \
        full_path(from_dir, from, full), full_path(to_dir, to, target); \
        if (strike(RENAME, full)) return -1; \
        int found = real passed; \
        if (found == 0 && is_inside(full)) record("rename", full, target, 0, 0, NULL); \
        return found; \
    }
RENAME_PATHS(rename, AT_FDCWD, AT_FDCWD, (const char *from, const char *to), (from, to), const char *, const char *)
RENAME_PATHS(renameat, d1, d2, (int d1, const char *from, int d2, const char *to), (d1, from, d2, to), int, const char *, int, const char *)

DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", const char *);
    char full[PATH_MAX];
    if (is_active && (full_path(AT_FDCWD, path, full), strike(LISTDIR, full))) return NULL;
    return real(path);
}

DIR *fdopendir(int fd) {
    REAL(DIR *, "fdopendir", int);
    char path[PATH_MAX];
    if (is_active && (fd_path(fd, path), strike(LISTDIR, path))) return NULL;
    return real(fd);
}

int socket(int domain, int type, int protocol) {
    REAL(int, "socket", int, int, int);
    return is_active && strike(SOCKET, "") ? -1 : real(domain, type, protocol);
}

static double jump(void) { return jump_s != 0 && ++num_readings >= jump_at ? jump_s : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int found = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += (time_t)jump();
    return found;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return to ? (*to = now.tv_sec) : now.tv_sec;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(int, "gettimeofday", struct timeval *, void *);
    int found = real(now, zone);
    now->tv_sec += (time_t)jump();
    return found;
}
