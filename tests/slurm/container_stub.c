/* Stand-in for the pyxis plugin: srun takes its options, nothing runs in a container, and the tasks
 * see what was given: --container-image=X as STUB_CONTAINER_IMAGE=X.
 * Build: gcc -shared -fPIC -o container_stub.so container_stub.c */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <slurm/spank.h>

SPANK_PLUGIN(container_stub, 1)

static struct {
    char *name;
    int has_value;
    char *given;
} options[] = {
    {"container-image", 1, NULL},      {"container-mounts", 1, NULL},
    {"container-workdir", 1, NULL},    {"container-env", 1, NULL},
    {"container-name", 1, NULL},       {"container-mount-home", 0, NULL},
    {"no-container-mount-home", 0, NULL}, {"container-writable", 0, NULL},
};
#define NUM_OPTIONS ((int)(sizeof options / sizeof options[0]))

static int take(int number, const char *value, int is_remote)
{
    (void)is_remote;
    free(options[number].given);
    options[number].given = strdup(value != NULL && *value ? value : "yes");
    return options[number].given != NULL ? 0 : -1;
}

int slurm_spank_init(spank_t spank, int num_args, char **args)
{
    (void)num_args, (void)args;
    for (int number = 0; number < NUM_OPTIONS; number++) {
        struct spank_option option = {
            .name = options[number].name,
            .arginfo = options[number].has_value ? "VALUE" : NULL,
            .usage = "kept for the tasks to see",
            .has_arg = options[number].has_value,
            .val = number,
            .cb = take,
        };
        if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
            return -1;
    }
    return 0;
}

int slurm_spank_task_init(spank_t spank, int num_args, char **args)
{
    (void)num_args, (void)args;
    for (int number = 0; number < NUM_OPTIONS; number++) {
        char variable[64];
        if (options[number].given == NULL)
            continue;
        snprintf(variable, sizeof variable, "STUB_%s", options[number].name);
        for (char *c = variable; *c; c++)
            *c = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
        spank_setenv(spank, variable, options[number].given, 1);
    }
    return 0;
}
