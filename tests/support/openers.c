/* Does one thing to one path in one of several ways, and prints 0 or the errno.
 *
 * Usage: openers WAY PATH. Ways: open, create, stat, access, mkdir, openat2, openat2-create, uring-open, uring-create, uring-stat.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/openat2.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CREATE (O_CREAT | O_WRONLY)

static int open_how(const char *path, int flags)
{
    struct open_how how = {.flags = (uint64_t)flags, .mode = flags & O_CREAT ? 0644 : 0};

    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof(how));
}

/* One request through a ring of our own, without liburing. */
static int submit(struct io_uring_sqe wanted)
{
    struct io_uring_params setup = {0};
    int ring = (int)syscall(SYS_io_uring_setup, 1, &setup);

    if (ring < 0)
        return -1;
    size_t size = setup.cq_off.cqes + setup.cq_entries * sizeof(struct io_uring_cqe);
    char *queues = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *sqe = mmap(NULL, sizeof(*sqe), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);

    if (queues == MAP_FAILED || sqe == MAP_FAILED)
        return -1;
    *sqe = wanted;
    ((unsigned *)(queues + setup.sq_off.array))[0] = 0;
    __atomic_store_n((unsigned *)(queues + setup.sq_off.tail), 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
        return -1;
    int result = ((struct io_uring_cqe *)(queues + setup.cq_off.cqes))->res;

    if (result < 0)
        errno = -result;
    return result < 0 ? -1 : result;
}

static int open_by_ring(const char *path, int flags)
{
    struct io_uring_sqe sqe = {.opcode = IORING_OP_OPENAT, .fd = AT_FDCWD, .addr = (uintptr_t)path, .len = 0644, .open_flags = (unsigned)flags};

    return submit(sqe);
}

static int stat_by_ring(const char *path)
{
    static struct statx found;
    struct io_uring_sqe sqe = {.opcode = IORING_OP_STATX, .fd = AT_FDCWD, .addr = (uintptr_t)path, .len = STATX_ALL, .off = (uintptr_t)&found};

    return submit(sqe);
}

static int act(const char *way, const char *path)
{
    struct stat found;

    if (!strcmp(way, "open"))
        return open(path, O_RDONLY);
    if (!strcmp(way, "create"))
        return open(path, CREATE, 0644);
    if (!strcmp(way, "stat"))
        return stat(path, &found);
    if (!strcmp(way, "access"))
        return access(path, F_OK);
    if (!strcmp(way, "mkdir"))
        return mkdir(path, 0755);
    if (!strcmp(way, "openat2"))
        return open_how(path, O_RDONLY);
    if (!strcmp(way, "openat2-create"))
        return open_how(path, CREATE);
    if (!strcmp(way, "uring-open"))
        return open_by_ring(path, O_RDONLY);
    if (!strcmp(way, "uring-create"))
        return open_by_ring(path, CREATE);
    if (!strcmp(way, "uring-stat"))
        return stat_by_ring(path);
    errno = EINVAL;
    return -1;
}

int main(int count, char **words)
{
    printf("%d\n", count == 3 && act(words[1], words[2]) >= 0 ? 0 : errno);
    return 0;
}
