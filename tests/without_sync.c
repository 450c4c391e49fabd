/*
 * Preloaded into the processes that run the tests: what they write need not outlive a power cut, and they would wait
 * for the disk forty thousand times, some milliseconds each. Python and SQLite ask as they always do, and are told that
 * it is done. What is on the disk after a power cut, tests/agent/records/power_cut asks of processes of its own; these
 * are preloaded with what keeps account of each write and each wait instead.
 */

#include <fcntl.h>

static int done(int fd) {
    return fcntl(fd, F_GETFD) < 0 ? -1 : 0; /* what is no open file is an error here too */
}

int fsync(int fd) {
    return done(fd);
}

int fdatasync(int fd) {
    return done(fd);
}
