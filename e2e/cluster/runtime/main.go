// Command runtime stands before runc where root lacks a capability (CAP_SYS_RESOURCE, say): docker's --privileged asks for all
// of them and would fail. It takes out of a container's configuration what this process may not give, then becomes runc.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// capabilities in the order of their numbers.
var capabilities = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
	NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT
	SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE
	MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE`)

type object = map[string]any

// allowed are the capabilities that this process may hand on.
func allowed() map[string]bool {
	status, _ := os.ReadFile("/proc/self/status")
	set := map[string]bool{}
	for _, line := range strings.Split(string(status), "\n") {
		hex, found := strings.CutPrefix(line, "CapBnd:")
		if !found {
			continue
		}
		bits, _ := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
		for number, name := range capabilities {
			if bits>>number&1 == 1 {
				set["CAP_"+name] = true
			}
		}
	}
	return set
}

// limit takes out of a process's settings what this process may not give.
func limit(process object) {
	may := allowed()
	sets, _ := process["capabilities"].(object)
	for kind, value := range sets {
		wanted, _ := value.([]any)
		given := []any{}
		for _, name := range wanted {
			if text, _ := name.(string); may[text] {
				given = append(given, name)
			}
		}
		sets[kind] = given
	}
	if score, _ := process["oomScoreAdj"].(json.Number); strings.HasPrefix(score.String(), "-") && !may["CAP_SYS_RESOURCE"] {
		delete(process, "oomScoreAdj")
	}
	var own syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &own) != nil || may["CAP_SYS_RESOURCE"] {
		return
	}
	limits, _ := process["rlimits"].([]any)
	for _, value := range limits {
		entry, _ := value.(object)
		if entry["type"] != "RLIMIT_NOFILE" {
			continue
		}
		for _, side := range []string{"hard", "soft"} {
			number, _ := entry[side].(json.Number)
			if n, err := strconv.ParseUint(number.String(), 10, 64); err == nil && n > own.Max {
				entry[side] = json.Number(strconv.FormatUint(own.Max, 10))
			}
		}
	}
}

// rewrite changes a bundle's configuration, or the settings of a process that joins a container.
func rewrite(file string, bundle bool) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	decoder := json.NewDecoder(strings.NewReader(string(text)))
	decoder.UseNumber()
	var settings object
	if err := decoder.Decode(&settings); err != nil {
		return err
	}
	process := settings
	if bundle {
		process, _ = settings["process"].(object)
	}
	limit(process)
	if text, err = json.Marshal(settings); err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o600)
}

// option is the value of an option in any of its spellings.
func option(arguments []string, names ...string) string {
	for i, argument := range arguments {
		for _, name := range names {
			if argument == name && i+1 < len(arguments) {
				return arguments[i+1]
			}
			if value, found := strings.CutPrefix(argument, name+"="); found {
				return value
			}
		}
	}
	return ""
}

func run() error {
	arguments := os.Args[1:]
	for _, argument := range arguments {
		var err error
		switch argument {
		case "create", "run":
			err = rewrite(filepath.Join(option(arguments, "--bundle", "-b"), "config.json"), true)
		case "exec":
			if file := option(arguments, "--process", "-p"); file != "" {
				err = rewrite(file, false)
			}
		default:
			continue
		}
		if err != nil {
			return err
		}
		break
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	return syscall.Exec(runc, append([]string{"runc"}, arguments...), os.Environ())
}

func main() {
	fmt.Fprintln(os.Stderr, "runtime:", run())
	os.Exit(1)
}
