/*
 * The layer between pyfuse3 and libfuse. It adds what neither of them offers.
 *
 * The library is loaded with RTLD_GLOBAL before pyfuse3, so the dynamic linker finds these definitions before those of libfuse:
 *  - fuse_reply_open and fuse_reply_create send FOPEN_PASSTHROUGH with the backing id (upper half of fh), and any other flag;
 *  - fuse_session_receive_buf reads into the table of requests in flight, and first returns what a dead process left there;
 *  - fuse_session_process_buf records the request being processed: its number (bit 63: left by a dead process) and whether it drops
 *    set-id bits;
 *  - fuse_session_new adds fallocate, copy_file_range, lseek and ioctl, for which pyfuse3 has no handlers, and replaces release.
 *    It offers lookup, getattr and create to a fast path first, because a task of pyfuse3 costs more than these operations.
 *    Small writes to files that Python has named (shim_set_writer) need no Python at all.
 *
 * Everything runs in the one thread that runs pyfuse3, under the GIL. Only the table of requests outlives the process.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 312
#include <dlfcn.h>
#include <errno.h>
#include <fuse_lowlevel.h>
#include <linux/falloc.h>
#include <linux/fuse.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The headers of Debian 12 lack these. */
#define OPEN_NOFLUSH (1u << 5)
#define OPEN_PASSTHROUGH (1u << 7)
#define KILL_AT_OPEN (1u << 0)
#define KILL_AT_WRITE (1u << 2)
#define KILL_AT_SETATTR (1u << 11)

/* In the number of a request that a dead process left, and in that of an interrupt. */
#define REPEATED_BIT (1ull << 63)
#define INTERRUPT_BIT 1ull

#define PAGE_BYTES 4096

/* Marks the file info of an opendir. Its fh uses all 64 bits and holds no backing id. */
#define DIRECTORY_MARK 0x64697231u

/*
 * Callbacks into Python, called inside fuse_session_process_buf. The first four send one reply, now or later. The others are the fast path:
 * 0 means that no reply was sent, and pyfuse3 handles the request.
 */
struct callbacks {
    void (*fallocate)(fuse_req_t req, uint64_t ino, int mode, int64_t offset, int64_t length, uint64_t fh);
    void (*copy_file_range)(fuse_req_t req, uint64_t ino_in, int64_t offset_in, uint64_t fh_in, uint64_t ino_out, int64_t offset_out,
                            uint64_t fh_out, uint64_t length, int flags);
    void (*lseek)(fuse_req_t req, uint64_t ino, int64_t offset, int whence, uint64_t fh);
    void (*release)(fuse_req_t req, uint64_t ino, uint64_t fh);
    int (*lookup)(fuse_req_t req, uint64_t parent, const char *name, uint32_t pid);
    int (*getattr)(fuse_req_t req, uint64_t ino, uint32_t pid);
    int (*create)(fuse_req_t req, uint64_t parent, const char *name, uint32_t mode, uint32_t uid, uint32_t gid, uint32_t pid);
};

/* The request being processed. */
uint64_t shim_unique;
uint32_t shim_pid;
/* The numbers of the requests that signals interrupted last. */
#define INTERRUPTED_COUNT 1024
uint64_t shim_interrupted[INTERRUPTED_COUNT];
uint32_t shim_kill_privileges;
/* FOPEN_* flags for the next reply to an open, create or opendir. Cleared by that reply. */
uint32_t shim_open_flags;
/* Requests that a dead process left and that are not taken up yet. */
uint32_t shim_left;
/* 1 if the last request stayed in the kernel because all slots are taken. */
uint32_t shim_is_full;

static struct callbacks python;
static struct fuse_session *session;
static void (*write_buf_of_pyfuse3)(fuse_req_t req, fuse_ino_t ino, struct fuse_bufvec *in, off_t offset, struct fuse_file_info *fi);
static void (*init_of_pyfuse3)(void *userdata, struct fuse_conn_info *conn);
static void (*opendir_of_pyfuse3)(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
static void (*getxattr_of_pyfuse3)(fuse_req_t req, fuse_ino_t ino, const char *name, size_t size);
static void (*lookup_of_pyfuse3)(fuse_req_t req, fuse_ino_t parent, const char *name);
static void (*getattr_of_pyfuse3)(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
static void (*create_of_pyfuse3)(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *fi);

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* --- replies ------------------------------------------------------------------------------------------------------ */

static void fill_open(struct fuse_open_out *out, const struct fuse_file_info *fi)
{
    uint32_t backing = fi->poll_events == DIRECTORY_MARK ? 0 : (uint32_t)(fi->fh >> 32);

    memset(out, 0, sizeof(*out));
    out->fh = fi->fh;
    out->open_flags = shim_open_flags;
    shim_open_flags = 0;
    if (fi->direct_io)
        out->open_flags |= FOPEN_DIRECT_IO;
    if (fi->nonseekable)
        out->open_flags |= FOPEN_NONSEEKABLE;
    if (fi->poll_events == DIRECTORY_MARK)
        return;
    if (backing) {
        /* The kernel rejects KEEP_CACHE together with PASSTHROUGH. */
        out->open_flags |= OPEN_PASSTHROUGH;
        memcpy((char *)out + 12, &backing, sizeof(backing));
    } else if (fi->keep_cache) {
        out->open_flags |= FOPEN_KEEP_CACHE;
    }
}

int fuse_reply_open(fuse_req_t req, const struct fuse_file_info *fi)
{
    struct fuse_open_out out;

    fill_open(&out, fi);
    return fuse_reply_buf(req, (const char *)&out, sizeof(out));
}

static void split_seconds(double timeout_s, uint64_t *seconds, uint32_t *nanoseconds)
{
    if (timeout_s < 0)
        timeout_s = 0;
    if (timeout_s > 4e9)
        timeout_s = 4e9;
    *seconds = (uint64_t)timeout_s;
    *nanoseconds = (uint32_t)((timeout_s - (double)*seconds) * 1e9);
}

int fuse_reply_create(fuse_req_t req, const struct fuse_entry_param *e, const struct fuse_file_info *fi)
{
    struct {
        struct fuse_entry_out entry;
        struct fuse_open_out open;
    } out;
    struct fuse_attr *attr = &out.entry.attr;

    memset(&out, 0, sizeof(out));
    out.entry.nodeid = e->ino;
    out.entry.generation = e->generation;
    split_seconds(e->entry_timeout, &out.entry.entry_valid, &out.entry.entry_valid_nsec);
    split_seconds(e->attr_timeout, &out.entry.attr_valid, &out.entry.attr_valid_nsec);
    attr->ino = e->attr.st_ino;
    attr->size = (uint64_t)e->attr.st_size;
    attr->blocks = (uint64_t)e->attr.st_blocks;
    attr->atime = (uint64_t)e->attr.st_atim.tv_sec;
    attr->mtime = (uint64_t)e->attr.st_mtim.tv_sec;
    attr->ctime = (uint64_t)e->attr.st_ctim.tv_sec;
    attr->atimensec = (uint32_t)e->attr.st_atim.tv_nsec;
    attr->mtimensec = (uint32_t)e->attr.st_mtim.tv_nsec;
    attr->ctimensec = (uint32_t)e->attr.st_ctim.tv_nsec;
    attr->mode = e->attr.st_mode;
    attr->nlink = (uint32_t)e->attr.st_nlink;
    attr->uid = e->attr.st_uid;
    attr->gid = e->attr.st_gid;
    attr->rdev = (uint32_t)e->attr.st_rdev;
    attr->blksize = (uint32_t)e->attr.st_blksize;
    fill_open(&out.open, fi);
    return fuse_reply_buf(req, (const char *)&out, sizeof(out));
}

/* --- the request being processed ---------------------------------------------------------------------------------- */

static uint32_t drops_set_id_bits(const struct fuse_in_header *in, size_t size)
{
    const void *body = in + 1;

    size -= sizeof(*in);
    switch (in->opcode) {
    case FUSE_WRITE:
        return size >= sizeof(struct fuse_write_in) && (((const struct fuse_write_in *)body)->write_flags & KILL_AT_WRITE);
    case FUSE_OPEN:
        return size >= sizeof(struct fuse_open_in) && (((const struct fuse_open_in *)body)->open_flags & KILL_AT_OPEN);
    case FUSE_CREATE:
        return size >= sizeof(struct fuse_create_in) && (((const struct fuse_create_in *)body)->open_flags & KILL_AT_OPEN);
    case FUSE_SETATTR:
        return size >= sizeof(struct fuse_setattr_in) && (((const struct fuse_setattr_in *)body)->valid & KILL_AT_SETATTR);
    default:
        return 0;
    }
}

/* --- the table of requests in flight: see request_table.py ------------------------------------------------------------- */

/* Slots of one size. Only the first `used` have been touched; `next` goes round among these. */
struct slots {
    char *start;
    size_t bytes;
    uint32_t count, used, next;
};

static struct slots small, large;
static int connection_fd, table_fd;
static off_t large_offset;
/* What the dead process left, in the order of its numbers. The last `shim_left` are still to be taken up. */
static struct fuse_in_header **left;
static uint32_t left_count;
/* The request that was received and is processed next, whether a dead process left it, and whether it was answered at once. */
static struct fuse_in_header *received;
static bool received_is_left, is_answered;

static struct fuse_in_header *get_slot(const struct slots *slots, uint32_t index)
{
    return (struct fuse_in_header *)(slots->start + index * slots->bytes);
}

/*
 * Does the kernel wait for a reply to this request? A reply to its interrupt (bit 0) has no effect unless it is ENOSYS or EAGAIN, and fails
 * with ENOENT if the kernel knows no such request.
 */
static bool is_waited_for(uint64_t unique)
{
    struct fuse_out_header probe = {.len = sizeof(probe), .unique = unique | INTERRUPT_BIT};

    return write(connection_fd, &probe, sizeof(probe)) >= 0 || errno != ENOENT;
}

/*
 * Make the memory of a large slot present and keep it so. If the kernel has to fetch a page while it copies a request, and the process is
 * killed at this moment, it fails the request with EIO. An ordinary user may lock little memory; then the pages are present until they
 * are swapped out.
 */
static void populate(const struct slots *slots, uint32_t index)
{
    volatile char *slot = slots->start + index * slots->bytes;

    (void)mlock((const void *)slot, slots->bytes);
    for (size_t at = 0; at < slots->bytes; at += PAGE_BYTES)
        slot[at] = slot[at];
}

/* Find a slot whose request has been answered. Touches another slot only if there is none; returns NULL if all are taken. */
static struct fuse_in_header *find_free_slot(struct slots *slots)
{
    for (uint32_t tried = 0; tried < slots->used; tried++) {
        struct fuse_in_header *slot = get_slot(slots, slots->next);

        slots->next = (slots->next + 1) % slots->used;
        if (!slot->len || !is_waited_for(slot->unique))
            return slot;
    }
    if (slots->used == slots->count)
        return NULL;
    if (slots == &large)
        populate(slots, slots->used);
    return get_slot(slots, slots->used++);
}

/* Move a request to a small slot, so that the large one can take the next. At each moment at least one of them holds it. */
static struct fuse_in_header *move_to_small(struct fuse_in_header *from)
{
    struct fuse_in_header *to = from->len <= small.bytes ? find_free_slot(&small) : NULL;

    if (!to)
        return from;
    to->len = 0;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    memcpy((char *)to + sizeof(to->len), (char *)from + sizeof(from->len), from->len - sizeof(from->len));
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    to->len = from->len;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    from->len = 0;
    return to;
}

/* Give back the memory of the large slots that are not in use. */
static void release_unused(void)
{
    size_t used = large.used * large.bytes, size = large.count * large.bytes;

    (void)munlock(large.start + used, size - used);
    (void)fallocate(table_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, large_offset + (off_t)used, (off_t)(size - used));
}

static int compare_numbers(const void *one, const void *other)
{
    uint64_t a = (*(struct fuse_in_header *const *)one)->unique, b = (*(struct fuse_in_header *const *)other)->unique;

    return a < b ? -1 : a > b;
}

/* Collect the requests in these slots to which the kernel still waits for a reply. */
static void collect_left(struct slots *slots)
{
    for (uint32_t index = 0; index < slots->count; index++) {
        struct fuse_in_header *slot = get_slot(slots, index);

        if (!slot->len)
            continue;
        if (slot->len < sizeof(*slot) || slot->len > slots->bytes || !is_waited_for(slot->unique)) {
            slot->len = 0;
            continue;
        }
        left[left_count++] = slot;
        slots->used = index + 1;
    }
    if (!slots->used)
        slots->used = 1;
}

/* Map the table and find what a dead process left in it. Returns 0 or an errno. Call it once, before the first request is read. */
int shim_map_table(int fuse_fd, int fd, int64_t offset, uint32_t small_count, uint32_t small_bytes, uint32_t large_count, uint32_t large_bytes)
{
    size_t small_size = (size_t)small_count * small_bytes, size = small_size + (size_t)large_count * large_bytes;
    char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);

    left = calloc(small_count + large_count, sizeof(*left));
    if (start == MAP_FAILED || !left)
        return errno;
    connection_fd = fuse_fd;
    table_fd = fd;
    large_offset = offset + (off_t)small_size;
    small = (struct slots){.start = start, .bytes = small_bytes, .count = small_count};
    large = (struct slots){.start = start + small_size, .bytes = large_bytes, .count = large_count};
    collect_left(&small);
    collect_left(&large);
    for (uint32_t index = 0; index < large.used; index++)
        populate(&large, index);
    release_unused();
    qsort(left, left_count, sizeof(*left), compare_numbers);
    for (uint32_t index = 1; index < left_count; index++)
        /* The process died while it moved this one. Both slots hold all of it. */
        if (left[index]->unique == left[index - 1]->unique) {
            left[index]->len = 0;
            memmove(left + index, left + index + 1, (--left_count - index) * sizeof(*left));
        }
    shim_left = left_count;
    return 0;
}

/* Give back the memory of large slots, if many writes came at once and are answered now. Keeps `kept` slots. */
void shim_trim_table(uint32_t kept)
{
    uint32_t used = large.used;

    while (large.used > kept) {
        struct fuse_in_header *last = get_slot(&large, large.used - 1);

        if (last->len && is_waited_for(last->unique))
            break;
        large.used--;
    }
    if (large.used == used)
        return;
    large.next = 0;
    release_unused();
}

/* --- receiving and processing ------------------------------------------------------------------------------------------ */

/* Return the size of the next request, 0 if the connection has ended, or a negative errno. EINTR: there is none now. */
int fuse_session_receive_buf(struct fuse_session *se, struct fuse_buf *buf)
{
    ssize_t size;

    (void)buf;
    received_is_left = shim_left > 0;
    if (received_is_left) {
        received = left[left_count - shim_left--];
        return (int)received->len;
    }
    received = find_free_slot(&large);
    shim_is_full = !received;
    if (!received)
        return -EINTR;
    received->len = 0;
    size = read(connection_fd, received, large.bytes);
    if (size >= (ssize_t)sizeof(*received))
        return (int)size;
    /* An error after the header was copied: the kernel has failed this request. */
    received->len = 0;
    if (size >= 0)
        return -EIO;
    /* The connection has ended. A read that takes a request at that moment gets ECONNABORTED, later ones get ENODEV. */
    if (errno == ENODEV || errno == ECONNABORTED) {
        fuse_session_exit(se);
        return 0;
    }
    /* ENOENT and EAGAIN: the request was withdrawn. pyfuse3 raises on these and waits again on EINTR. */
    return errno == ENOENT || errno == EAGAIN ? -EINTR : -errno;
}

static bool wants_reply(const struct fuse_in_header *in)
{
    return in->opcode != FUSE_FORGET && in->opcode != FUSE_BATCH_FORGET && in->opcode != FUSE_INTERRUPT;
}

static void process(struct fuse_session *se, const struct fuse_buf *buf, uint64_t flags)
{
    static void (*next)(struct fuse_session *, const struct fuse_buf *);
    const struct fuse_in_header *in = buf->mem;

    if (!next)
        next = NEXT(fuse_session_process_buf);
    if (in->opcode == FUSE_INTERRUPT) {
        static uint32_t count;

        shim_interrupted[count++ % INTERRUPTED_COUNT] = ((const struct fuse_interrupt_in *)(in + 1))->unique & ~REPEATED_BIT;
    }
    shim_unique = in->unique | flags;
    shim_pid = in->pid;
    shim_kill_privileges = drops_set_id_bits(in, buf->size) != 0;
    next(se, buf);
}

/* Process the request that was received. It stays in its slot until the kernel has the reply, whenever that is sent. */
void fuse_session_process_buf(struct fuse_session *se, const struct fuse_buf *buf)
{
    struct fuse_buf request = {0};

    (void)buf;
    if (wants_reply(received) && !received_is_left)
        received = move_to_small(received);
    request.mem = received;
    request.size = received->len;
    is_answered = false;
    process(se, &request, received_is_left ? REPEATED_BIT : 0);
    if (is_answered || !wants_reply(received))
        received->len = 0;
}

/*
 * Process the saved INIT request as if it had been read from the kernel, which sends INIT only once. Returns 0 if no session was made through
 * this file: pyfuse3 was loaded first.
 */
int shim_process_saved_init(void *bytes, size_t size)
{
    struct fuse_buf buf = {.mem = bytes, .size = size};

    if (session)
        process(session, &buf, 0);
    return session != NULL;
}

/* --- operations without pyfuse3 --------------------------------------------------------------------------------------- */

/* Call it before a session is made. */
void shim_set_callbacks(const struct callbacks *callbacks)
{
    python = *callbacks;
}

static void on_init(void *userdata, struct fuse_conn_info *conn)
{
    init_of_pyfuse3(userdata, conn);
    /* Splicing adds two system calls to each small request and hides the header from fuse_session_process_buf. */
    conn->want &= ~(FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE);
}

static void on_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    fi->poll_events = DIRECTORY_MARK;
    opendir_of_pyfuse3(req, ino, fi);
}

static bool has_prefix(const char *name, const char *prefix)
{
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

/* The kernel asks for security.capability at the first write to each file, and ls asks for ACLs. ckptfs has neither. */
static void on_getxattr(fuse_req_t req, fuse_ino_t ino, const char *name, size_t size)
{
    if (has_prefix(name, "security."))
        fuse_reply_err(req, ENODATA);
    else if (has_prefix(name, "system."))
        fuse_reply_err(req, EOPNOTSUPP);
    else
        getxattr_of_pyfuse3(req, ino, name, size);
}

static void on_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t offset, off_t length, struct fuse_file_info *fi)
{
    python.fallocate(req, ino, mode, offset, length, fi->fh);
}

static void on_copy_file_range(fuse_req_t req, fuse_ino_t ino_in, off_t offset_in, struct fuse_file_info *fi_in, fuse_ino_t ino_out,
                               off_t offset_out, struct fuse_file_info *fi_out, size_t length, int flags)
{
    python.copy_file_range(req, ino_in, offset_in, fi_in->fh, ino_out, offset_out, fi_out->fh, length, flags);
}

static void on_lseek(fuse_req_t req, fuse_ino_t ino, off_t offset, int whence, struct fuse_file_info *fi)
{
    python.lseek(req, ino, offset, whence, fi->fh);
}

static void on_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    python.release(req, ino, fi->fh);
}

static void on_ioctl(fuse_req_t req, fuse_ino_t ino, unsigned int cmd, void *arg, struct fuse_file_info *fi, unsigned flags, const void *in,
                     size_t in_size, size_t out_size)
{
    (void)ino, (void)cmd, (void)arg, (void)fi, (void)flags, (void)in, (void)in_size, (void)out_size;
    fuse_reply_err(req, ENOTTY);
}

/* --- the fast path ---------------------------------------------------------------------------------------------------- */

static void on_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    is_answered = python.lookup(req, parent, name, fuse_req_ctx(req)->pid);
    if (!is_answered)
        lookup_of_pyfuse3(req, parent, name);
}

static void on_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    is_answered = python.getattr(req, ino, fuse_req_ctx(req)->pid);
    if (!is_answered)
        getattr_of_pyfuse3(req, ino, fi);
}

static void on_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *fi)
{
    const struct fuse_ctx *caller = fuse_req_ctx(req);

    is_answered = python.create(req, parent, name, mode, caller->uid, caller->gid, caller->pid);
    if (!is_answered)
        create_of_pyfuse3(req, parent, name, mode, fi);
}

/*
 * Descriptors by handle, for writers of files in memory. Of two handles with one place, the later one has it; the other one's writes go
 * through pyfuse3, as do those that fail or write less.
 */
#define WRITERS 4096
#define WRITER_BYTES_MAX (128 * 1024)
static struct {
    uint32_t handle;
    int fd;
} writers[WRITERS];

/* fd -1 forgets the handle. Handle 0 is none. */
void shim_set_writer(uint32_t handle, int fd)
{
    if (fd >= 0 || writers[handle % WRITERS].handle == handle) {
        writers[handle % WRITERS].handle = fd >= 0 ? handle : 0;
        writers[handle % WRITERS].fd = fd;
    }
}

static void on_write_buf(fuse_req_t req, fuse_ino_t ino, struct fuse_bufvec *in, off_t offset, struct fuse_file_info *fi)
{
    uint32_t handle = (uint32_t)fi->fh;
    size_t size = in->buf[in->idx].size - in->off;
    bool is_plain = in->count == in->idx + 1 && !(in->buf[in->idx].flags & FUSE_BUF_IS_FD);

    if (handle && writers[handle % WRITERS].handle == handle && is_plain && size <= WRITER_BYTES_MAX && !shim_kill_privileges &&
        pwrite(writers[handle % WRITERS].fd, (char *)in->buf[in->idx].mem + in->off, size, offset) == (ssize_t)size)
        fuse_reply_write(req, size);
    else
        write_buf_of_pyfuse3(req, ino, in, offset, fi);
}

/* Return the operations of pyfuse3 with ours. */
static struct fuse_lowlevel_ops add_operations(const struct fuse_lowlevel_ops *of_pyfuse3, size_t size)
{
    struct fuse_lowlevel_ops ops = {0};

    memcpy(&ops, of_pyfuse3, size < sizeof(ops) ? size : sizeof(ops));
    init_of_pyfuse3 = ops.init;
    opendir_of_pyfuse3 = ops.opendir;
    getxattr_of_pyfuse3 = ops.getxattr;
    lookup_of_pyfuse3 = ops.lookup;
    getattr_of_pyfuse3 = ops.getattr;
    create_of_pyfuse3 = ops.create;
    write_buf_of_pyfuse3 = ops.write_buf;
    ops.init = on_init;
    ops.opendir = on_opendir;
    ops.getxattr = on_getxattr;
    ops.ioctl = on_ioctl;
    ops.fallocate = on_fallocate;
    ops.copy_file_range = on_copy_file_range;
    ops.lseek = on_lseek;
    ops.release = on_release;
    ops.lookup = on_lookup;
    ops.getattr = on_getattr;
    ops.create = on_create;
    ops.write_buf = on_write_buf;
    return ops;
}

#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 17)
struct fuse_session *fuse_session_new_versioned(struct fuse_args *args, const struct fuse_lowlevel_ops *op, size_t op_size,
                                                struct libfuse_version *version, void *userdata)
{
    struct fuse_lowlevel_ops ops = add_operations(op, op_size);

    return session = NEXT(fuse_session_new_versioned)(args, &ops, sizeof(ops), version, userdata);
}
#else
struct fuse_session *fuse_session_new(struct fuse_args *args, const struct fuse_lowlevel_ops *op, size_t op_size, void *userdata)
{
    struct fuse_lowlevel_ops ops = add_operations(op, op_size);

    return session = NEXT(fuse_session_new)(args, &ops, sizeof(ops), userdata);
}
#endif
