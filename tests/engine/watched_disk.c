/* Preloaded into a process that runs a store: what of its file is on disk, and what it is told about writes.
 *
 * UPRIVER_DISK_IMAGE names a file that holds what a power cut would leave. Whatever is written reaches it with the next
 * fdatasync or fsync of that file, or at once where the file was opened to be written through; nothing else does.
 * UPRIVER_DISK_FULL names a file: while it is there, writing through fails as on a full disk. In LMDB that is the head of
 * a commit, which it writes last. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int is_store(int fd) {
    char link[64], name[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, name, sizeof name - 1);
    if (size < 9) return 0;
    name[size] = 0;
    return strcmp(name + size - 9, "/data.mdb") == 0;
}

static int is_through(int fd) { return fcntl(fd, F_GETFL) & O_DSYNC && is_store(fd); }

static ssize_t real_pwrite(int fd, const void *data, size_t size, off_t place) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = (ssize_t(*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    return real(fd, data, size, place);
}

static int image(void) {
    const char *path = getenv("UPRIVER_DISK_IMAGE");
    return path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t place) {
    const char *full = getenv("UPRIVER_DISK_FULL");
    int through = is_through(fd), to;
    if (through && full && access(full, F_OK) == 0) {
        errno = ENOSPC;
        return -1;
    }
    ssize_t written = real_pwrite(fd, data, size, place);
    if (through && written > 0 && (to = image()) >= 0) {
        if (real_pwrite(to, data, written, place) != written) abort();
        close(to);
    }
    return written;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t place) { return pwrite(fd, data, size, place); }

static void synced(int fd) {
    static char buffer[1 << 16];
    ssize_t size;
    int to;
    if (!is_store(fd) || (to = image()) < 0) return;
    for (off_t place = 0; (size = pread(fd, buffer, sizeof buffer, place)) > 0; place += size)
        if (real_pwrite(to, buffer, size, place) != size) abort();
    close(to);
}

int fdatasync(int fd) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    int failed = real(fd);
    if (!failed) synced(fd);
    return failed;
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    int failed = real(fd);
    if (!failed) synced(fd);
    return failed;
}
