/* Threads that crop the files of several calls at once, so that a whole batch needs one call from Python.
 *
 * Calls are served in the order they came, and a thread takes one file at a time. Threads are started when they are
 * first needed and live as long as the process; a forked process starts its own.
 */
#define _POSIX_C_SOURCE 200809L
#include "jpeg.h"

#include <signal.h>

enum { MAX_THREADS = 256, STACK_BYTES = 1 << 20 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t has_work = PTHREAD_COND_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static jpeg_job *first_job; /* jobs with files that no thread has taken yet, oldest first */
static int num_threads;

static void *work(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (first_job == NULL) pthread_cond_wait(&has_work, &lock);
        jpeg_job *job = first_job;
        int file = job->next++;
        if (job->next == job->num_files) first_job = job->later;
        pthread_mutex_unlock(&lock);
        jpeg_crop_file(job, file);
        pthread_mutex_lock(&lock);
        if (--job->num_left == 0) pthread_cond_signal(&job->has_ended);
    }
    return NULL;
}

/* The threads and the calls of the parent are not in the child. */
static void forget_threads(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&has_work, NULL);
    first_job = NULL;
    num_threads = 0;
}

static void prepare_for_forks(void) { pthread_atfork(NULL, NULL, forget_threads); }

/* Starts threads until there are `wanted`, or no more can be had; the caller holds the lock. Signals are for the threads
 * of Python. */
static void start_threads(int wanted) {
    pthread_attr_t attributes;
    sigset_t all, before;
    if (num_threads >= wanted || pthread_attr_init(&attributes) != 0) return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    while (num_threads < wanted && num_threads < MAX_THREADS) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, work, NULL) != 0) break;
        num_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

void jpeg_run_job(jpeg_job *job, int wanted_threads) {
    job->next = 0, job->num_left = job->num_files, job->later = NULL;
    if (job->num_files == 0) return;
    pthread_once(&once, prepare_for_forks);
    pthread_mutex_lock(&lock);
    if (wanted_threads > 1) start_threads(wanted_threads);
    if (wanted_threads <= 1 || num_threads == 0) {
        pthread_mutex_unlock(&lock);
        for (int file = 0; file < job->num_files; file++) jpeg_crop_file(job, file);
        return;
    }
    jpeg_job **end = &first_job;
    while (*end != NULL) end = &(*end)->later;
    *end = job;
    pthread_cond_init(&job->has_ended, NULL);
    pthread_cond_broadcast(&has_work);
    while (job->num_left > 0) pthread_cond_wait(&job->has_ended, &lock);
    pthread_cond_destroy(&job->has_ended);
    pthread_mutex_unlock(&lock);
}
