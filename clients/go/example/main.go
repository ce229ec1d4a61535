// Asks a chat question and streams the answer, then asks again: the second time the prompt comes from the cache.
// Run it against `kvsidecar serve`; an argument names another worker ("unix:/PATH" or "host:port").
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"kvsidecar"
	pb "kvsidecar/gen/kvsidecar/inference/v1"
)

func main() {
	target := ""
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	client, err := kvsidecar.Dial(target)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	defer client.Close()
	most := uint32(24)
	request := &pb.GenerateRequest{
		Prompt:    kvsidecar.Chat(&pb.ChatMessage{Role: "user", Content: "What is the capital of Germany?"}),
		MaxTokens: &most,
	}
	for turn := 0; turn < 2; turn++ {
		if err := answer(client, request); err != nil {
			var failed *kvsidecar.Error
			if errors.As(err, &failed) && failed.Reason == "UNAVAILABLE" {
				fmt.Fprintln(os.Stderr, "no worker is there; start one with: kvsidecar serve")
			}
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func answer(client *kvsidecar.Client, request *pb.GenerateRequest) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return client.Stream(ctx, request, func(part *pb.GenerateStreamResponse) error {
		fmt.Print(part.Text)
		if usage := part.Usage; usage != nil {
			fmt.Printf("\n[%d prompt tokens, %d from the cache]\n", usage.PromptTokens, usage.CachedTokens)
		}
		return nil
	})
}
