/* Preloaded into a process: appends every change of files under $KVTIER_LOG_ROOT to $KVTIER_LOG,
 * in the order in which the calls returned.
 *
 * An entry: u8 kind, u16 path length, u64 offset, u32 data length, path, data.
 *   W write (D: through a descriptor that syncs each write)   S sync   T length set   A room made
 *   R rename (data: the new name)   U unlink
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;

static int under_root(const char *path) {
    const char *root = getenv("KVTIER_LOG_ROOT");
    return root && strncmp(path, root, strlen(root)) == 0;
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return under_root(path);
}

static void put(const void *data, size_t size) {
    const char *at = data;
    while (size) {
        long n = syscall(SYS_write, log_fd, at, size);
        if (n <= 0) abort();
        at += n;
        size -= n;
    }
}

static void entry(char kind, const char *path, uint64_t offset, const struct iovec *iov, int count,
                  size_t done) {
    uint16_t length = strlen(path);
    uint32_t size = done;
    pthread_mutex_lock(&lock);
    if (log_fd < 0) {
        log_fd = syscall(SYS_openat, AT_FDCWD, getenv("KVTIER_LOG"),
                         O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (log_fd < 0) abort();
    }
    put(&kind, 1);
    put(&length, 2);
    put(&offset, 8);
    put(&size, 4);
    put(path, length);
    for (int i = 0; i < count && done; i++) {
        size_t part = iov[i].iov_len < done ? iov[i].iov_len : done;
        put(iov[i].iov_base, part);
        done -= part;
    }
    pthread_mutex_unlock(&lock);
}

static void wrote(int fd, const struct iovec *iov, int count, off_t offset, ssize_t done) {
    char path[PATH_MAX];
    if (done <= 0 || !path_of(fd, path)) return;
    char kind = fcntl(fd, F_GETFL) & O_DSYNC ? 'D' : 'W';
    entry(kind, path, offset, iov, count, done);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define PWRITE(name, off)                                                     \
    ssize_t name(int fd, const void *data, size_t size, off offset) {         \
        ssize_t done = REAL(name)(fd, data, size, offset);                    \
        struct iovec iov = {(void *)data, size};                              \
        wrote(fd, &iov, 1, offset, done);                                     \
        return done;                                                          \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define PWRITEV(name, off)                                                    \
    ssize_t name(int fd, const struct iovec *iov, int count, off offset) {    \
        ssize_t done = REAL(name)(fd, iov, count, offset);                    \
        wrote(fd, iov, count, offset, done);                                  \
        return done;                                                          \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

#define PWRITEV2(name, off)                                                              \
    ssize_t name(int fd, const struct iovec *iov, int count, off offset, int flags) {    \
        ssize_t done = REAL(name)(fd, iov, count, offset, flags);                        \
        wrote(fd, iov, count, offset, done);                                             \
        return done;                                                                     \
    }
PWRITEV2(pwritev2, off_t)
PWRITEV2(pwritev64v2, off64_t)

ssize_t write(int fd, const void *data, size_t size) {
    off_t offset = lseek(fd, 0, SEEK_CUR);
    ssize_t done = syscall(SYS_write, fd, data, size);
    struct iovec iov = {(void *)data, size};
    if (offset >= 0) wrote(fd, &iov, 1, offset, done);
    return done;
}

ssize_t writev(int fd, const struct iovec *iov, int count) {
    off_t offset = lseek(fd, 0, SEEK_CUR);
    ssize_t done = REAL(writev)(fd, iov, count);
    if (offset >= 0) wrote(fd, iov, count, offset, done);
    return done;
}

static void synced(int fd, int result) {
    char path[PATH_MAX];
    if (result == 0 && path_of(fd, path)) entry('S', path, 0, NULL, 0, 0);
}

int fdatasync(int fd) {
    int result = REAL(fdatasync)(fd);
    synced(fd, result);
    return result;
}

int fsync(int fd) {
    int result = REAL(fsync)(fd);
    synced(fd, result);
    return result;
}

int msync(void *at, size_t size, int flags) {
    /* A store that changed files through a map would need its pages logged: it does not. */
    fputs("msync was called\n", stderr);
    abort();
}

#define SIZE(name, kind, parameters, arguments, size)                         \
    int name parameters {                                                     \
        int result = REAL(name) arguments;                                    \
        char path[PATH_MAX];                                                  \
        if (result == 0 && path_of(fd, path)) entry(kind, path, size, NULL, 0, 0); \
        return result;                                                        \
    }
SIZE(ftruncate, 'T', (int fd, off_t size), (fd, size), size)
SIZE(ftruncate64, 'T', (int fd, off64_t size), (fd, size), size)
SIZE(posix_fallocate, 'A', (int fd, off_t at, off_t size), (fd, at, size), at + size)
SIZE(posix_fallocate64, 'A', (int fd, off64_t at, off64_t size), (fd, at, size), at + size)

int rename(const char *from, const char *to) {
    int result = REAL(rename)(from, to);
    struct iovec iov = {(void *)to, strlen(to)};
    if (result == 0 && under_root(from)) entry('R', from, 0, &iov, 1, strlen(to));
    return result;
}

int unlink(const char *path) {
    int result = REAL(unlink)(path);
    if (result == 0 && under_root(path)) entry('U', path, 0, NULL, 0, 0);
    return result;
}
