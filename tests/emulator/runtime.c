/* What the lowered kernels need around them: temporaries, the loop over the grid, and guarded buffers. */

#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

/* Guard zones of poison lie directly before and behind a buffer; beyond them nothing is mapped, for a GiB, and
   poison comes where a kernel reads. A fence takes the place of one of the zones: there nothing is mapped from
   the first byte on, and where a kernel first reads and first writes is noted. */
enum { GUARD = 1 << 12, PAGE = 1 << 12 };
static const size_t UNMAPPED = (size_t)1 << 30, ARENA = (size_t)1 << 30;

static uint32_t poison;
static sigjmp_buf stop;
static void *fault_address;

/* Byte i of a zone holds byte i % 4 of the poison, counted from where the buffer starts. */
static uint32_t rotated(int64_t offset) {
    int shift = 8 * (int)(offset & 3);
    return shift ? poison >> shift | poison << (32 - shift) : poison;
}

static void fill(char *zone, size_t bytes, uint32_t word) {
    if (bytes <= 4) {
        memcpy(zone, &word, bytes);
        return;
    }
    memcpy(zone, &word, 4);
    for (size_t done = 4; done < bytes; done *= 2)
        memcpy(zone + done, zone, done < bytes - done ? done : bytes - done);
}

/* The first byte of a zone that isn't poison any more, or `bytes`. */
static size_t first_change(const char *zone, size_t bytes, uint32_t word) {
    if (bytes >= 4 && !memcmp(zone, &word, 4) && !memcmp(zone, zone + 4, bytes - 4)) return bytes;
    size_t i = 0;
    while (i < bytes && zone[i] == ((char *)&word)[i % 4]) i++;
    return i;
}

/* Guarded buffers. */

enum { NO_FENCE, BEFORE, BEHIND };
enum { READ, WRITE };

typedef struct Buffer {
    char *data;
    int64_t bytes;
    int64_t outside[2]; /* the first READ and WRITE to meet a fence, in bytes from the start of the data */
    int fence;
    char *mapping;
    size_t mapped;
    struct Buffer *next;
} Buffer;

static Buffer *buffers;
static char *served; /* the last page that was made readable for a kernel */

static char *first_byte(const Buffer *buffer) { return buffer->mapping + UNMAPPED; }
static char *end(const Buffer *buffer) { return buffer->mapping + buffer->mapped - UNMAPPED; }

void emulator_poison(uint32_t word) { poison = word; }

int emulator_guard(Buffer *buffer, const char *source, int64_t bytes, int fence) {
    /* Kernels are specialised by the alignment of their pointers: keep it, where no fence needs another. */
    size_t before = fence ? 0 : GUARD + (uintptr_t)source % 64;
    size_t inner = (before + (size_t)bytes + (fence ? 0 : GUARD) + PAGE - 1) / PAGE * PAGE;
    if (fence == BEHIND) before = inner - bytes;
    buffer->bytes = bytes;
    buffer->outside[READ] = buffer->outside[WRITE] = INT64_MIN;
    buffer->fence = fence;
    buffer->mapped = inner + 2 * UNMAPPED;
    buffer->mapping =
        mmap(0, buffer->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (buffer->mapping == MAP_FAILED) return -1;
    buffer->next = buffers;
    buffers = buffer;
    served = 0;
    buffer->data = first_byte(buffer) + before;
    if (mprotect(first_byte(buffer), inner, PROT_READ | PROT_WRITE)) return -1;
    fill(first_byte(buffer), before, rotated(-(int64_t)before));
    if (bytes) memcpy(buffer->data, source, bytes);
    fill(buffer->data + bytes, end(buffer) - buffer->data - bytes, rotated(bytes));
    return 0;
}

/* The first byte of a guard zone that was written to, as an offset from the start of the data, and whether. */
int emulator_trespass(const Buffer *buffer, int64_t *offset) {
    size_t before = buffer->data - first_byte(buffer), behind = end(buffer) - buffer->data - buffer->bytes;
    size_t changed = first_change(first_byte(buffer), before, rotated(-(int64_t)before));
    *offset = (int64_t)changed - (int64_t)before;
    if (changed < before) return 1;
    changed = first_change(buffer->data + buffer->bytes, behind, rotated(buffer->bytes));
    *offset = buffer->bytes + (int64_t)changed;
    return changed < behind;
}

void emulator_release(Buffer *buffer) {
    Buffer **link = &buffers;
    while (*link != buffer) link = &(*link)->next;
    *link = buffer->next;
    munmap(buffer->mapping, buffer->mapped);
}

/* Poison for an access outside of a buffer; the triton-ascend compiler reads whole tiles where it can't make a
   box of their mask, and then selects. 0 if there is none: for a write without a fence, or too far out. */
static int serve(char *address, int kind) {
    char *page = address - (uintptr_t)address % PAGE;
    Buffer *buffer = buffers;
    while (buffer && (page < buffer->mapping || page >= buffer->mapping + buffer->mapped)) buffer = buffer->next;
    /* A write that was taken for a read comes back to the page that was just made readable. */
    if (page == served) kind = WRITE;
    if (!buffer || (kind == WRITE && !buffer->fence)) return 0;
    if (buffer->fence && buffer->outside[kind] == INT64_MIN) buffer->outside[kind] = address - buffer->data;
    served = page;
    if (mprotect(page, PAGE, PROT_READ | PROT_WRITE)) return 0;
    fill(page, PAGE, rotated(page - buffer->data));
    return kind == WRITE || !mprotect(page, PAGE, PROT_READ);
}

/* Temporaries live until their program ends, and start out as poison: the device doesn't clear them either. */

static char *arena;
static size_t used;

void *_mlir_memref_to_llvm_alloc(uint64_t bytes) {
    size_t start = (used + 63) & ~(size_t)63;
    if (start + bytes > ARENA) siglongjmp(stop, -1);
    used = start + bytes;
    fill(arena + start, bytes, poison);
    return arena + start;
}

void _mlir_memref_to_llvm_free(void *pointer) { (void)pointer; }

/* Running. */

/* What the fault was; only x86 tells, elsewhere all are taken for reads. */
static int kind_of(const ucontext_t *context) {
#ifdef __x86_64__
    return context->uc_mcontext.gregs[REG_ERR] & 2 ? WRITE : READ;
#else
    (void)context;
    return READ;
#endif
}

static void on_fault(int number, siginfo_t *info, void *context) {
    if (number == SIGSEGV && serve(info->si_addr, kind_of(context))) return;
    fault_address = info->si_addr;
    siglongjmp(stop, number);
}

void *emulator_fault_address(void) { return fault_address; }

/* 0, the number of the signal that stopped a program, or -1: no room for its temporaries. */
int emulator_run(void (*program)(void *, int32_t, int32_t, int32_t), void *arguments, int32_t grid_x,
                 int32_t grid_y, int32_t grid_z) {
    static const int caught[] = {SIGSEGV, SIGBUS, SIGFPE};
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO}, before[3];
    if (!arena) {
        void *room = mmap(0, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (room == MAP_FAILED) return -1;
        arena = room;
    }
    for (int i = 0; i < 3; i++) sigaction(caught[i], &action, &before[i]);
    int status = sigsetjmp(stop, 1);
    if (!status)
        for (int32_t z = 0; z < grid_z; z++)
            for (int32_t y = 0; y < grid_y; y++)
                for (int32_t x = 0; x < grid_x; x++) {
                    used = 0;
                    program(arguments, x, y, z);
                }
    for (int i = 0; i < 3; i++) sigaction(caught[i], &before[i], 0);
    return status;
}

/* Called by the lowered code. */

typedef struct {
    int64_t rank;
    int64_t *descriptor; /* allocated, aligned, offset, sizes..., strides... */
} Memref;

static void copy(int64_t rank, size_t element, char *to, const char *from, const int64_t *sizes,
                 const int64_t *to_strides, const int64_t *from_strides) {
    if (rank == 0) {
        memcpy(to, from, element);
    } else if (rank == 1 && to_strides[0] == 1 && from_strides[0] == 1) {
        if (sizes[0] > 0) memcpy(to, from, sizes[0] * element);
    } else {
        for (int64_t i = 0; i < sizes[0]; i++)
            copy(rank - 1, element, to + i * to_strides[0] * (int64_t)element,
                 from + i * from_strides[0] * (int64_t)element, sizes + 1, to_strides + 1, from_strides + 1);
    }
}

void memrefCopy(int64_t element, Memref *from, Memref *to) {
    int64_t rank = from->rank, *f = from->descriptor, *t = to->descriptor;
    copy(rank, element, (char *)t[1] + t[2] * element, (char *)f[1] + f[2] * element, f + 3, t + 3 + rank,
         f + 3 + rank);
}

/* Round to nearest even, NaN stays NaN; not in every libgcc. */
__bf16 __truncsfbf2(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) bits |= 0x400000;
    else bits += 0x7fff + (bits >> 16 & 1);
    uint16_t high = bits >> 16;
    __bf16 result;
    memcpy(&result, &high, 2);
    return result;
}
