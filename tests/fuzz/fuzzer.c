/* fuzzer.c - libFuzzer plays a target of tests/c/fuzz.h: `make -C tests fuzz`, or
 *
 *     tests/out/fuzz/fuzzer --target=votes -runs=100000 -seed=1 FOLDER
 *
 * The only file that knows libFuzzer, which brings main().
 */
#include "fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

static const struct fuzz_target *target;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static const char option[] = "--target=";
    for (int i = 1; i < *argc; i++)
        if (strncmp((*argv)[i], option, sizeof option - 1) == 0)
            target = fuzz_target_named((*argv)[i] + sizeof option - 1);
    if (!target) {
        fputs("which --target=? check, votes, tree, stall, heads, report, tagged or signed\n", stderr);
        exit(2);
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    target->play((struct fuzz_input){bytes, count});
    return 0;
}
