#!/usr/bin/env bash
# A real SLURM of one node on this machine, for the tests: cluster.sh start DIR [MAX_ARRAY_SIZE], cluster.sh stop DIR,
# cluster.sh node DIR (start the node's daemon again after it died).
#
# Own directories, ports and munge socket, loopback only, no systemd, no control groups, no accounting. Runs as whoever
# starts it, who then owns the cluster. Needs Debian's slurm-wlm and munge. On success the commands work with
# SLURM_CONF=DIR/slurm.conf. Whatever fails is said in one line, with exit code 3.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

fail() { echo "no SLURM can be started here: $*" >&2; exit 3; }

stop() {
    for daemon in slurmd slurmctld munged; do
        [ -s "$1/$daemon.pid" ] && kill "$(cat "$1/$daemon.pid")" 2>/dev/null || true
    done
}

node() {
    SLURM_CONF=$1/slurm.conf slurmd -N fold >"$1/log/slurmd.out" 2>&1 ||
        fail "slurmd: $(tail -qn 1 "$1/log/slurmd.out" "$1/log/slurmd.log")"
}

start() {
    local dir=$1 array=${2:-1001} host port user
    for program in munged slurmctld slurmd sbatch srun; do
        command -v "$program" >/dev/null || fail "$program is not installed (apt-get install slurm-wlm munge)"
    done
    mkdir -p "$dir"/{state,spool,log}
    chmod 755 "$dir"
    host=$(hostname -s)
    user=$(id -un)
    port=$(python3 -c 'import socket; s = [socket.socket() for _ in range(2)]; [x.bind(("127.0.0.1", 0)) for x in s]; print(*[x.getsockname()[1] for x in s])')
    head -c 1024 /dev/urandom > "$dir/munge.key"
    chmod 400 "$dir/munge.key"
    munged --force --key-file="$dir/munge.key" --socket="$dir/munge.sock" --pid-file="$dir/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed" >"$dir/log/munged.out" 2>&1 ||
        fail "munged: $(tail -n 1 "$dir/log/munged.out")"
    cat > "$dir/slurm.conf" <<CONF
ClusterName=fold
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
SlurmctldPort=${port% *}
SlurmdPort=${port#* }
AuthType=auth/munge
CryptoType=crypto/munge
# A requeued job waits for the life of a credential, two minutes by default.
AuthInfo=socket=$dir/munge.sock,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,batch_sched_delay=0,sched_min_interval=0
MaxArraySize=$array
JobRequeue=1
KillWait=1
SlurmdTimeout=10
MinJobAge=3600
ReturnToService=2
MpiDefault=none
GresTypes=gpu
NodeName=fold NodeHostname=$host NodeAddr=127.0.0.1 CPUs=8 Sockets=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=test Nodes=fold Default=YES MaxTime=INFINITE State=UP
CONF
    # A "GPU" is any device file to SLURM, which then counts it, gives it to one job and sets CUDA_VISIBLE_DEVICES.
    echo "NodeName=fold Name=gpu File=/dev/null,/dev/zero" > "$dir/gres.conf"
    export SLURM_CONF=$dir/slurm.conf
    slurmctld -c >"$dir/log/slurmctld.out" 2>&1 ||
        fail "slurmctld: $(tail -qn 1 "$dir/log/slurmctld.out" "$dir/log/slurmctld.log")"
    node "$dir"
    for _ in $(seq 120); do
        sinfo --noheader --format=%t 2>/dev/null | grep -q idle && return
        sleep 0.5
    done
    fail "the node does not come up ($(tail -n 1 "$dir/log/slurmctld.log"))"
}

case ${1:-} in
    start) start "$(realpath -m "$2")" "${3:-}" ;;
    stop) stop "$(realpath -m "$2")" ;;
    node) node "$(realpath -m "$2")" ;;
    *) fail "usage: cluster.sh start|stop|node DIR" ;;
esac
