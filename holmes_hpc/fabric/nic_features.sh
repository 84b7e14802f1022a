#!/bin/sh
# node_features/helpers: prints the NIC features of this node, one per line. It cannot change them.
# slurm.conf needs NodeFeaturesPlugins=node_features/helpers, and helpers.conf a line with all features that any node
# prints: Feature=nic_ib,nic_200g,eth_25g Helper=/etc/slurm/this-script. Constraints then take no counts and brackets.
[ $# -gt 0 ] && exit 0
SYS=${HOLMES_SYSFS:-/sys}
read_() { cat "$1" 2>/dev/null; }
ib_ports=0 roce_ports=0
# the rails are the ports of the highest rate: "best count" and a port's rate make the new "best count"
add() { echo "$1 $2" | awk '{ if ($3 > $1) print $3, 1; else if ($3 == $1) print $1, $2 + 1; else print $1, $2 }'; }
product() { echo "$1" | awk '{print $1 * $2}'; }
ib="0 0" roce="0 0"
for port in "$SYS"/class/infiniband/*/ports/[0-9]*; do
    [ -d "$port" ] || continue
    device=${port%/ports/*}
    [ -d "$device/device/physfn/infiniband" ] && continue                # a virtual function of a physical one here
    case "$(read_ "$port/state")" in *ACTIVE*) ;; *) continue ;; esac
    case "$(read_ "$device/node_type")" in 1:*) ;; *) continue ;; esac   # iWARP and others are not used
    case "${device##*/}" in hfi1*|opa*) continue ;; esac                 # Omni-Path
    rate=$(read_ "$port/rate" | awk '{print $1 + 0}')
    case "$(read_ "$port/link_layer")" in
    InfiniBand) ib=$(add "$ib" "$rate"); ib_ports=$((ib_ports + 1)) ;;
    Ethernet)
        owner=
        for type in "$port"/gid_attrs/types/*; do
            [ "$(read_ "$type")" = "RoCE v2" ] || continue
            case "$(read_ "$port/gids/${type##*/}")" in 0000:0000:0000:0000:0000:ffff:*) ;; *) continue ;; esac
            owner=$(read_ "$port/gid_attrs/ndevs/${type##*/}")
            [ -n "$owner" ] && break
        done
        if [ -z "$owner" ]; then
            for net in "$device"/device/net/*; do [ -d "$net" ] && owner=${net##*/} && break; done
        fi
        [ -n "$owner" ] || continue
        master=$(readlink "$SYS/class/net/$owner/master")
        [ -n "$master" ] && owner=${master##*/}
        if [ -d "$SYS/class/net/$owner/bonding" ]; then
            rate=$(echo "$rate $(read_ "$SYS/class/net/$owner/speed")" | awk '{b = $2 / 1000; print (b > $1) ? b : $1}')
        fi
        roce=$(add "$roce" "$rate"); roce_ports=$((roce_ports + 1)) ;;
    esac
done
ib=$(product "$ib") roce=$(product "$roce")
if [ $((ib_ports + roce_ports)) -gt 0 ]; then
    if [ "$(echo "$ib $roce" | awk '{print ($1 >= $2)}')" = 1 ]; then nic=ib rate=$ib; else nic=roce rate=$roce; fi
else
    nic=ethernet rate=0
fi
# the fastest interface that is up, plain Ethernet or RoCE; a VLAN or a bridge has the speed of its lower interfaces
speed=0
for net in "$SYS"/class/net/*; do
    name=${net##*/}
    case "$name" in lo|docker*|br-*|virbr*|veth*|ifb*|tun*|tap*|mgmt*|bmc*|ipmi*|idrac*|usb*) continue ;; esac
    [ "$(read_ "$net/type")" = 32 ] && continue
    [ -L "$net/master" ] && continue
    [ "$(read_ "$net/operstate")" = up ] || continue
    case "$(readlink -f "$net")" in
    */virtual/*) [ -d "$net/bonding" ] || for below in "$net"/lower_*; do net=$below; done ;;
    esac
    case "$(readlink -f "$net")" in */virtual/*) [ -d "$net/bonding" ] || continue ;; esac
    now=$(read_ "$net/speed"); now=${now:-0}
    [ "$now" -gt "$speed" ] && speed=$now
done
ethernet=$(echo "$speed" | awk '{print $1 / 1000}')
[ "$nic" = ethernet ] && rate=$ethernet
echo "nic_$nic"
[ "$rate" != 0 ] && echo "nic_${rate}g"
[ "$ethernet" != 0 ] && echo "eth_${ethernet}g"
[ -r /etc/holmes/fabric ] && echo "fabric_$(cat /etc/holmes/fabric)"
exit 0
