// A plugin of qemu-user that counts the guest's instructions, in all and in a range of addresses.
//
// The guest marks places by a system call that does nothing, getppid, with the range in its first two arguments and
// kMark in its third. Each mark writes one line: instructions since the start, and those of the range.
//
// No package of Debian's contains qemu's header: the prototypes below are of version 1 of the interface.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef uint64_t qemu_plugin_id_t;
typedef struct qemu_info_t qemu_info_t;
struct qemu_plugin_tb;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, enum qemu_plugin_op, void*, uint64_t);
void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t,
                                          void (*)(qemu_plugin_id_t, unsigned, int64_t, uint64_t, uint64_t, uint64_t,
                                                   uint64_t, uint64_t, uint64_t, uint64_t, uint64_t));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb*);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

enum { kGetppidX86 = 110, kGetppidArm = 173, kMark = 0x7e4a };

struct Block {
    uint64_t address, instructions;
    struct Block* next;
};
static struct Block* blocks;
static FILE* output;

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb* tb) {
    (void)id;
    struct Block* block = malloc(sizeof *block);
    if (block == NULL) abort();
    *block = (struct Block){qemu_plugin_tb_vaddr(tb), 0, blocks};
    blocks = block;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, QEMU_PLUGIN_INLINE_ADD_U64, &block->instructions,
                                             qemu_plugin_tb_n_insns(tb));
}

static void called(qemu_plugin_id_t id, unsigned cpu, int64_t number, uint64_t low, uint64_t high, uint64_t mark,
                   uint64_t a4, uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8) {
    (void)id, (void)cpu, (void)a4, (void)a5, (void)a6, (void)a7, (void)a8;
    if ((number != kGetppidX86 && number != kGetppidArm) || mark != kMark) return;
    uint64_t all = 0, inside = 0;
    for (const struct Block* block = blocks; block != NULL; block = block->next) {
        all += block->instructions;
        if (low <= block->address && block->address < high) inside += block->instructions;
    }
    fprintf(output, "%llu %llu\n", (unsigned long long)all, (unsigned long long)inside);
    fflush(output);
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t* info, int argc,
                                                               char** argv) {
    (void)info;
    // out=PATH
    output = argc == 1 ? fopen(argv[0] + 4, "w") : NULL;
    if (output == NULL) return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_vcpu_syscall_cb(id, called);
    return 0;
}
