/* Read-only mappings of files that outlive a cut of the file: a fault within one is answered with zero pages.

   Reading a mapped page that the file does not have any more, or that the disk cannot give, is SIGBUS. The handler maps
   zero pages from the faulting page to the end of the mapping, remembers that the mapping is damaged, and lets the read
   go on; whoever reads asks afterwards. All other faults go where they went before. */

#ifndef KVMNN_FAULT_GUARD_H
#define KVMNN_FAULT_GUARD_H

#include <stddef.h>

typedef struct kv_region kv_region;

#ifdef _WIN32 /* Windows does not let a mapped file be cut. */

#include <io.h>
#include <windows.h>

static kv_region *kv_watch(void *address, size_t nbytes) { return (kv_region *)address; }
static void kv_unwatch(kv_region *region) {}
static void kv_release(kv_region *region) {}
static int kv_is_damaged(const kv_region *region) { return 0; }
static int kv_dup(int fd) { return _dup(fd); }
static void kv_close(int fd) { _close(fd); }
static void kv_release_pages(void *address, size_t nbytes) {}
static void kv_unmap(void *address, size_t nbytes) { UnmapViewOfFile(address); }

static void *kv_map(int fd, size_t nbytes)
{
    HANDLE mapping = CreateFileMappingW((HANDLE)_get_osfhandle(fd), NULL, PAGE_READONLY, 0, 0, NULL);
    void *address = mapping ? MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, nbytes) : NULL;
    if (mapping)
        CloseHandle(mapping);
    return address;
}

#else

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct kv_region {
    _Atomic uintptr_t begin, end; /* a region is active while end is not 0 */
    atomic_int in_use, damaged;
};

#define KV_CHUNK_REGIONS 256

typedef struct kv_chunk {
    kv_region regions[KV_CHUNK_REGIONS];
    struct kv_chunk *_Atomic next;
} kv_chunk;

static kv_chunk kv_first_chunk; /* chunks are added and never freed: the handler may be looking at them */
static struct sigaction kv_previous_action;
static uintptr_t kv_page_bytes;
static pthread_once_t kv_once = PTHREAD_ONCE_INIT;

static int kv_map_zeros(uintptr_t address)
{
    for (kv_chunk *chunk = &kv_first_chunk; chunk; chunk = atomic_load(&chunk->next))
        for (int i = 0; i < KV_CHUNK_REGIONS; i++) {
            kv_region *region = &chunk->regions[i];
            uintptr_t end = atomic_load(&region->end);
            if (address >= end || address < atomic_load(&region->begin))
                continue;
            uintptr_t page = address & ~(kv_page_bytes - 1);
            int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
            atomic_store(&region->damaged, 1);
            return mmap((void *)page, end - page, PROT_READ, flags, -1, 0) != MAP_FAILED;
        }
    return 0;
}

static void kv_on_sigbus(int number, siginfo_t *info, void *context)
{
    int error = errno;
    int from_kernel = info->si_code > 0;
    if (from_kernel && kv_map_zeros((uintptr_t)info->si_addr)) {
        errno = error;
        return;
    }
    if (kv_previous_action.sa_flags & SA_SIGINFO)
        kv_previous_action.sa_sigaction(number, info, context);
    else if (kv_previous_action.sa_handler == SIG_DFL || (kv_previous_action.sa_handler == SIG_IGN && from_kernel)) {
        signal(number, SIG_DFL);
        raise(number); /* is delivered when this handler returns */
    } else if (kv_previous_action.sa_handler != SIG_IGN)
        kv_previous_action.sa_handler(number);
    errno = error;
}

static void kv_install(void)
{
    struct sigaction action = {0};
    kv_page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    action.sa_sigaction = kv_on_sigbus;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &kv_previous_action);
}

/* NULL where there is no memory. */
static kv_region *kv_watch(void *address, size_t nbytes)
{
    pthread_once(&kv_once, kv_install);
    for (kv_chunk *chunk = &kv_first_chunk;;) {
        for (int i = 0; i < KV_CHUNK_REGIONS; i++) {
            kv_region *region = &chunk->regions[i];
            int expected_free = 0;
            if (!atomic_compare_exchange_strong(&region->in_use, &expected_free, 1))
                continue;
            atomic_store(&region->damaged, 0);
            atomic_store(&region->begin, (uintptr_t)address);
            atomic_store(&region->end, ((uintptr_t)address + nbytes + kv_page_bytes - 1) & ~(kv_page_bytes - 1));
            return region;
        }
        kv_chunk *next = atomic_load(&chunk->next);
        if (!next) {
            kv_chunk *new_chunk = calloc(1, sizeof *new_chunk);
            if (!new_chunk)
                return NULL;
            if (atomic_compare_exchange_strong(&chunk->next, &next, new_chunk))
                next = new_chunk;
            else
                free(new_chunk); /* another thread was first, and next is its chunk */
        }
        chunk = next;
    }
}

static void kv_unwatch(kv_region *region) { atomic_store(&region->end, 0); }
static void kv_release(kv_region *region) { atomic_store(&region->in_use, 0); }
static int kv_is_damaged(const kv_region *region) { return atomic_load(&region->damaged); }
static int kv_dup(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, 0); }
static void kv_close(int fd) { close(fd); }
static void kv_release_pages(void *address, size_t nbytes) { madvise(address, nbytes, MADV_DONTNEED); }
static void kv_unmap(void *address, size_t nbytes) { munmap(address, nbytes); }

static void *kv_map(int fd, size_t nbytes)
{
    void *address = mmap(NULL, nbytes, PROT_READ, MAP_SHARED, fd, 0);
    return address == MAP_FAILED ? NULL : address;
}

#endif
#endif
