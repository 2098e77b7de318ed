/* A clock that is wrong by the seconds in the file $WRONG_CLOCK, from one second to the next (`bad_luck.py`):
 *   cc -shared -fPIC -O2 -o wrong_clock.so wrong_clock.c -ldl; LD_PRELOAD=./wrong_clock.so WRONG_CLOCK=FILE COMMAND
 * Of the clocks only that of the day is wrong. libfaketime 0.9.10 breaks the sleep of Python 3.11. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define OF_THE_DAY 1000000000 /* A time beyond it is no time since the machine's start. */

static int true_time(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    return real(clock, now);
}

static long wrong_by(void) {
    static long seconds, looked = -1;
    struct timespec now;
    true_time(CLOCK_MONOTONIC, &now);
    if (now.tv_sec != looked) {
        char text[32] = "";
        const char *path = getenv("WRONG_CLOCK");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        looked = now.tv_sec;
        if (file >= 0) {
            if (read(file, text, sizeof text - 1) > 0) seconds = atol(text);
            close(file);
        }
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = true_time(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += wrong_by();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}

/* Who waits until a time of the wrong clock would wait for a day, or not at all. */

int pthread_cond_timedwait(pthread_cond_t *restrict sign, pthread_mutex_t *restrict lock,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec truly = *until;
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (truly.tv_sec > OF_THE_DAY) truly.tv_sec -= wrong_by();
    return real(sign, lock, &truly);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    struct timespec truly = *until;
    if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
    truly.tv_sec -= wrong_by();
    return real(semaphore, &truly);
}
