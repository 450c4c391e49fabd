/*
 * Preloaded into a process: writes down, in their order, all that it does to the files below one folder, what of that
 * it has synced, and what it told on its standard output. disk.py tells from that what a power cut would have left.
 *
 * Nothing is synced for real: that would only take time. Whatever else is done, is done. What is written and what is
 * written down about it happen under one lock, so that the order of the log is the order of what happened.
 *
 *     POWER_CUT_FOLDER   the folder, an absolute path without links
 *     POWER_CUT_LOG      the file of the log, which lies elsewhere
 *
 * An entry: kind (1 byte), file (its inode, 8), offset (8), length (8), all little-endian, and so many bytes:
 *     C name     a file is made          M name     a folder is made        P bytes   told on standard output
 *     W bytes    is written to a file    T (offset) a file is cut to size   S         a file, or a folder, is synced
 *     R a\0b     is renamed              U name     a name is removed       D name    a folder is removed
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))real(#name))
#define DESCRIPTORS 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char is_watched[DESCRIPTORS];
static int log_descriptor = -1;
static const char *folder;
static size_t folder_length;

static void give_up(const char *why) {
    dprintf(2, "write_log: %s: %s\n", why, strerror(errno));
    _exit(97);
}

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (found == NULL) give_up(name);
    return found;
}

__attribute__((constructor)) static void begin(void) {
    const char *log = getenv("POWER_CUT_LOG");
    folder = getenv("POWER_CUT_FOLDER");
    if (log == NULL || folder == NULL) give_up("POWER_CUT_LOG or POWER_CUT_FOLDER is not set");
    folder_length = strlen(folder);
    log_descriptor = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log_descriptor < 0) give_up(log);
}

static int is_below(const char *path) {
    return folder != NULL && path[0] == '/' && strncmp(path, folder, folder_length) == 0 &&
           (path[folder_length] == '/' || path[folder_length] == '\0');
}

static void put(const void *bytes, size_t length) {
    for (size_t done = 0; done < length;) {
        long written = syscall(SYS_write, log_descriptor, (const char *)bytes + done, length - done);
        if (written < 0) give_up("the log cannot be written");
        done += (size_t)written;
    }
}

static void note(char kind, uint64_t file, uint64_t offset, const void *bytes, uint64_t length) {
    char head[25];
    head[0] = kind;
    memcpy(head + 1, &file, 8);
    memcpy(head + 9, &offset, 8);
    memcpy(head + 17, &length, 8);
    put(head, sizeof head);
    put(bytes, length);
}

static uint64_t inode(int descriptor) {
    struct stat status;
    if (fstat(descriptor, &status) != 0) give_up("fstat");
    return status.st_ino;
}

static int watches(int descriptor) { return descriptor >= 0 && descriptor < DESCRIPTORS && is_watched[descriptor]; }

/* -- opening, closing -- */

static int opened(int at, const char *path, int flags, mode_t mode) {
    struct stat status;
    char link[40], name[PATH_MAX];
    pthread_mutex_lock(&lock);
    int is_new = (flags & O_CREAT) && fstatat(at, path, &status, AT_SYMLINK_NOFOLLOW) != 0;
    int descriptor = (int)syscall(SYS_openat, at, path, flags, mode);
    int error = errno;
    if (descriptor >= 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        ssize_t length = readlink(link, name, sizeof name - 1);
        name[length < 0 ? 0 : length] = '\0';
        if (is_below(name)) {
            if (descriptor >= DESCRIPTORS) give_up("too many open files");
            is_watched[descriptor] = 1;
            if (is_new) note('C', inode(descriptor), 0, name, strlen(name));
            else if (flags & O_TRUNC) note('T', inode(descriptor), 0, NULL, 0);
        }
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return descriptor;
}

#define OPENS(at)                                                 \
    va_list more;                                                 \
    va_start(more, flags);                                        \
    mode_t mode = (flags & O_CREAT) ? (mode_t)va_arg(more, int) : 0; \
    va_end(more);                                                 \
    return opened(at, path, flags, mode)

int open(const char *path, int flags, ...) { OPENS(AT_FDCWD); }
int open64(const char *path, int flags, ...) { OPENS(AT_FDCWD); }
int openat(int at, const char *path, int flags, ...) { OPENS(at); }
int openat64(int at, const char *path, int flags, ...) { OPENS(at); }

int close(int descriptor) {
    pthread_mutex_lock(&lock);
    if (watches(descriptor)) is_watched[descriptor] = 0;
    int answer = REAL(close)(descriptor);
    int error = errno;
    pthread_mutex_unlock(&lock);
    errno = error;
    return answer;
}

/* -- what a file holds -- */

static ssize_t written(int descriptor, const void *bytes, size_t count, off64_t offset) {
    pthread_mutex_lock(&lock);
    int is_at = offset >= 0, watched = watches(descriptor);
    if (watched && !is_at) {
        int flags = fcntl(descriptor, F_GETFL);
        offset = lseek64(descriptor, 0, (flags & O_APPEND) ? SEEK_END : SEEK_CUR);
    }
    ssize_t done = is_at ? syscall(SYS_pwrite64, descriptor, bytes, count, offset)
                         : syscall(SYS_write, descriptor, bytes, count);
    int error = errno;
    if (done > 0 && watched) note('W', inode(descriptor), (uint64_t)offset, bytes, (uint64_t)done);
    if (done > 0 && descriptor == 1) note('P', 0, 0, bytes, (uint64_t)done);
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

ssize_t write(int descriptor, const void *bytes, size_t count) { return written(descriptor, bytes, count, -1); }
ssize_t pwrite(int descriptor, const void *bytes, size_t count, off_t at) { return written(descriptor, bytes, count, at); }
ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off64_t at) { return written(descriptor, bytes, count, at); }

static int cut(int descriptor, off64_t size) {
    pthread_mutex_lock(&lock);
    int answer = (int)syscall(SYS_ftruncate, descriptor, size);
    int error = errno;
    if (answer == 0 && watches(descriptor)) note('T', inode(descriptor), (uint64_t)size, NULL, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return answer;
}

int ftruncate(int descriptor, off_t size) { return cut(descriptor, size); }
int ftruncate64(int descriptor, off64_t size) { return cut(descriptor, size); }

static int synced(int descriptor) {
    pthread_mutex_lock(&lock);
    if (watches(descriptor)) note('S', inode(descriptor), 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    return 0;
}

int fsync(int descriptor) { return synced(descriptor); }
int fdatasync(int descriptor) { return synced(descriptor); }

/* -- names -- */

static int noted(char kind, int answer, uint64_t file, const char *path) {
    int error = errno;
    if (answer == 0 && is_below(path)) note(kind, file, 0, path, strlen(path));
    pthread_mutex_unlock(&lock);
    errno = error;
    return answer;
}

/* The absolute path of a name in an open folder. */
static const char *whole(int at, const char *path, char into[PATH_MAX]) {
    char link[40], above[PATH_MAX];
    if (at == AT_FDCWD || path[0] == '/') return path;
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    ssize_t length = readlink(link, above, sizeof above - 1);
    if (length < 0) give_up(link);
    above[length] = '\0';
    if (snprintf(into, PATH_MAX, "%s/%s", above, path) >= PATH_MAX) give_up("too long a path");
    return into;
}

int mkdirat(int at, const char *name, mode_t mode) {
    struct stat status = {0};
    char place[PATH_MAX];
    const char *path = whole(at, name, place);
    pthread_mutex_lock(&lock);
    int answer = REAL(mkdirat)(at, name, mode);
    int error = errno;
    if (answer == 0 && stat(path, &status) != 0) give_up(path);
    errno = error;
    return noted('M', answer, status.st_ino, path);
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int at, const char *name, int flags) {
    char place[PATH_MAX];
    const char *path = whole(at, name, place);
    pthread_mutex_lock(&lock);
    return noted((flags & AT_REMOVEDIR) ? 'D' : 'U', REAL(unlinkat)(at, name, flags), 0, path);
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int renameat(int from_at, const char *from_name, int to_at, const char *to_name) {
    char both[2 * PATH_MAX], from_place[PATH_MAX], to_place[PATH_MAX];
    const char *from = whole(from_at, from_name, from_place), *to = whole(to_at, to_name, to_place);
    pthread_mutex_lock(&lock);
    int answer = REAL(renameat)(from_at, from_name, to_at, to_name);
    int error = errno;
    if (answer == 0 && is_below(from) != is_below(to)) give_up("renamed into the folder, or out of it");
    if (answer == 0 && is_below(from)) {
        int length = snprintf(both, sizeof both, "%s%c%s", from, '\0', to);
        note('R', 0, 0, both, (uint64_t)length);
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return answer;
}

int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }
